"""``python -m attnlib sweep``: its points, its picture, sweeps that stop and go on, and refusals."""

import argparse
import json
import os
import re
import signal
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import TEXT, save
from safetensors.torch import load_file
from stopped_runs import in_a_process
from transformers import GPT2Config, GPT2LMHeadModel

from attnlib import KVLayout
from attnlib.__main__ import main
from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.score.pair import scored
from attnlib.convert.score.stores import Store
from attnlib.convert.sweep import command, picture, run
from attnlib.convert.sweep.finished import FinishedPoints
from attnlib.convert.sweep.request import scored_on
from attnlib.convert.sweep.sizes import chosen_sizes
from attnlib.convert.sweep.table import with_front
from attnlib.convert.text import layerwise

SIZES = ("--kv-heads", "4,2", "--ranks", "12", "--rope-dim", "4")
STORES = ("--stores", "fp32,int8")
SHORT = ("--samples", "4", "--length", "20")
FILES = ("sweep.json", "sweep.md", "sweep.svg")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model with a name, and two texts beside it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "prose.txt").write_text(TEXT[:700])
    (folder / "code.txt").write_text(TEXT[700:])
    return save(folder / "small-model", "llama", attention_bias=False)


def words(source, out, *options):
    texts = [source.parent / name for name in ("prose.txt", "code.txt")]
    return [*map(str, ("sweep", source, out, *(options or (*SIZES, *STORES)), "--text", *texts, *SHORT))]


@pytest.fixture(scope="module")
def swept(source, tmp_path_factory):
    """A finished sweep: its folder."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    assert main([*words(source, out), "--quiet"]) == 0
    return out


def table_of(out):
    return json.loads((out / "sweep.json").read_text())


def files_of(out):
    """The bytes of all files of a sweep, by their path in its folder."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_sweep_has_a_point_for_each_size_and_store(swept):
    points = table_of(swept)["points"]
    names = ("source", "4 KV heads", "2 KV heads", "rank 12")
    assert {(x["name"], x["store"]) for x in points} == {(n, s) for n in names for s in ("fp32", "int8")}
    assert len(points) == 8
    sizes = [point["cache_bytes_per_token"] for point in points]
    assert sizes == sorted(sizes, reverse=True)
    layouts = {
        "source": KVLayout.grouped(8, 4),
        "4 KV heads": KVLayout.grouped(4, 4),
        "2 KV heads": KVLayout.grouped(2, 4),
        "rank 12": KVLayout.latent(12, 4),
    }
    for point in points:
        if point["store"] == "fp32":
            assert point["cache_bytes_per_token"] == 3 * layouts[point["name"]].token_bytes
    [latent] = [x for x in points if x["name"] == "rank 12" and x["store"] == "int8"]
    stored = KVLayout.latent(12, 4, dtype=torch.bfloat16, storage_dtype=torch.int8)
    assert latent["cache_bytes_per_token"] == 3 * stored.token_bytes


def test_the_source_loses_nothing_and_smaller_caches_more(swept):
    lost = {(x["name"], x["store"]): x["kl_nats"] for x in table_of(swept)["points"]}
    assert abs(lost["source", "fp32"]) < 1e-8 < lost["source", "int8"] < 0.1
    assert 0.1 < lost["4 KV heads", "fp32"] < lost["2 KV heads", "fp32"]
    for point in table_of(swept)["points"]:
        assert {text["name"] for text in point["by_text"]} == {"prose.txt", "code.txt"}


def test_a_point_is_what_its_options_convert_to(source, swept, tmp_path):
    """The options in the table, given to ``convert`` with the same texts, give the same divergence."""
    model = read_model(read_folder(source))
    for point in table_of(swept)["points"]:
        if point["store"] != "int8" or not point["options"]:
            continue
        out = tmp_path / point["name"]
        _, _, _, *rest = words(source, out, *point["options"].split())
        assert main(["convert", str(source), str(out), *rest, "--quiet"]) == 0
        report = json.loads((out / "conversion_report.json").read_text())
        used = [text["samples"] * 20 for text in report["settings"]["calibration"]["texts"]]
        windows, _ = scored_on([source.parent / x for x in ("prose.txt", "code.txt")], model, used)
        store = Store.of("int8", torch.float32)
        found = scored(read_folder(source), read_folder(out), windows, store=store)
        assert found["kl_nats"] == point["kl_nats"]


def test_the_picture_is_well_formed_and_names_the_model(swept):
    root = ElementTree.fromstring((swept / "sweep.svg").read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    said = " ".join("".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text"))
    for name in ("small-model, 24.3 thousand weights", "2 KV heads", "rank 12", "fp32 cache", "int8 cache"):
        assert name in said
    for name in ("prose.txt", "code.txt", "cache, bytes per token", "KL divergence"):
        assert name in said


def test_the_page_has_a_row_for_each_point(swept):
    page = (swept / "sweep.md").read_text()
    assert page.startswith("# small-model, 24.3 thousand weights\n")
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 8
    assert len({len(row) for row in rows}) == 1  # aligned, to be read on a terminal
    fronts = [row for row in rows if "| front |" in row]
    assert len(fronts) == sum(point["on_front"] for point in table_of(swept)["points"])
    assert "- 4 KV heads: `--to gqa --kv-heads 4`\n" in page
    assert "- rank 12: `--to mla --rank 12 --rope-dim 4`\n" in page


def test_a_sweep_leaves_no_model_behind(swept):
    found = {path.name for path in swept.iterdir()}
    assert found == {*FILES, "points"}
    assert {path.name for path in swept.parent.iterdir()} == {"out"}


def test_one_calibration_serves_all_points(source, tmp_path, monkeypatch):
    seen, honest = [], layerwise.observe
    monkeypatch.setattr(layerwise, "observe", lambda *given, **more: seen.append(0) or honest(*given, **more))
    assert main([*words(source, tmp_path / "out"), "--quiet"]) == 0
    assert len(seen) == 3  # layers


@pytest.mark.parametrize("finished", [0, 1, 3, 7])
def test_a_stopped_sweep_goes_on_and_writes_the_same(source, swept, tmp_path, monkeypatch, capsys, finished):
    out, put = tmp_path / "out", FinishedPoints.put

    def stop(self, point, scores):
        if len([*self.folder.iterdir()]) == finished:
            raise KeyboardInterrupt
        put(self, point, scores)

    with monkeypatch.context() as patch:
        patch.setattr(FinishedPoints, "put", stop)
        assert main([*words(source, out), "--quiet"]) == 130
    error = capsys.readouterr().err
    assert ("finished points are kept: run the same command again" in error) == (finished > 0)
    assert out.exists() == (finished > 0)
    seen, honest = [], run.cached_outputs
    monkeypatch.setattr(run, "cached_outputs", lambda *x, **more: seen.append(0) or honest(*x, **more))
    assert main([*words(source, out), "--quiet"]) == 0
    assert len(seen) == 8 - finished
    assert files_of(out) == files_of(swept)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def killed_sweep(given):
    """A sweep whose process is killed before it writes its fourth point."""
    put = FinishedPoints.put

    def kill(self, point, scores):
        if len([*self.folder.iterdir()]) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, point, scores)

    FinishedPoints.put = kill
    torch.set_num_threads(1)
    main([*given, "--quiet"])


def test_a_killed_sweep_goes_on_and_writes_the_same(source, swept, tmp_path):
    out = tmp_path / "out"
    assert in_a_process(killed_sweep, words(source, out)) == -signal.SIGKILL
    assert {path.name for path in out.iterdir()} > {"points", "converted"}
    assert main([*words(source, out), "--quiet"]) == 0
    assert files_of(out) == files_of(swept)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_finished_sweep_is_not_repeated_and_a_damaged_point_is(source, swept, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "points").mkdir()
    points = sorted((swept / "points").iterdir())
    for path in points:
        (out / "points" / path.name).write_bytes(path.read_bytes())
    (out / "points" / points[0].name).write_bytes(points[0].read_bytes()[:-9])
    (out / "points" / points[1].name).write_bytes(points[2].read_bytes())
    seen, honest = [], run.cached_outputs
    monkeypatch.setattr(run, "cached_outputs", lambda *x, **more: seen.append(0) or honest(*x, **more))
    assert main([*words(source, out), "--quiet"]) == 0
    assert len(seen) == 2
    assert files_of(out) == files_of(swept)


def test_more_stores_reuse_the_points_of_fewer(source, tmp_path, monkeypatch):
    seen, honest = [], run.cached_outputs
    monkeypatch.setattr(run, "cached_outputs", lambda *x, **more: seen.append(0) or honest(*x, **more))
    for stores, new in (("int8", 2), ("int8,fp8", 2), ("fp8,int8", 0)):
        seen.clear()
        given = words(source, tmp_path / "out", "--kv-heads", "2", "--stores", stores)
        assert main([*given, "--quiet"]) == 0
        assert len(seen) == new


def test_a_sweep_without_text_and_calibration(source, tmp_path, capsys):
    sizes = ("--caches", "50%", "--rope-dim", "4", "--stores", "bf16")
    given = ("sweep", source, tmp_path / "out", "--no-calibration", *sizes)
    assert main([*map(str, given)]) == 0
    table = table_of(tmp_path / "out")
    assert table["calibration"] == "no text, only the weights"
    assert [x["name"] for x in table["points"]] == ["source", "cache 50%"]
    assert table["points"][1]["cache_bytes_per_token"] <= table["source_bytes_per_token"]["bf16"] / 2
    assert len(table["points"][0]["by_text"]) == 8
    out, error = capsys.readouterr()
    assert "- cache 50%: `--to attnlib --cache 50% --rope-dim 4`" in out
    assert f"picture: {tmp_path / 'out' / 'sweep.svg'}" in out
    assert re.search(r"sweeping: 100%\|.*2/2", error)


def test_without_matplotlib_there_is_a_table(source, swept, tmp_path, monkeypatch, capsys):
    def missing(*_):
        raise ModuleNotFoundError("a picture needs matplotlib: pip install 'attnlib[demo]'")

    monkeypatch.setattr(picture, "blank", missing)
    out = tmp_path / "out"
    assert main(words(source, out, "--kv-heads", "2", "--stores", "int8")) == 0
    assert {path.name for path in out.iterdir()} == {"sweep.json", "sweep.md", "points"}
    assert "a picture needs matplotlib: pip install 'attnlib[demo]'" in capsys.readouterr().out


def default_sizes(folder, stores=2, **options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args([str(folder), "out"])
    return chosen_sizes(arguments, read_model(read_folder(folder)), stores=stores)


def test_the_default_sizes_are_those_that_the_model_permits(tmp_path):
    """Norms of q and k permit latents in attnlib's own form, and GPT-2 no stock form of either."""
    llama = default_sizes(save(tmp_path / "llama", "llama", attention_bias=False))
    assert [size.name for size in llama] == [
        "source", "4 KV heads", "rank 16", "rank 12", "2 KV heads", "rank 32",
    ]  # fmt: skip
    qwen = default_sizes(save(tmp_path / "qwen3", "qwen3"))
    assert {size.options[1] for size in qwen[1:] if "rank" in size.name} == {"attnlib"}
    assert {size.options[1] for size in qwen[1:] if "head" in size.name} == {"gqa"}
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128)).save_pretrained(
        tmp_path / "gpt2"
    )
    gpt2 = default_sizes(tmp_path / "gpt2")
    assert {size.options[:2] for size in gpt2[1:]} == {("--to", "attnlib")}
    for stores in (1, 2, 3, 4):
        assert len(default_sizes(tmp_path / "llama", stores=stores)) * stores <= 12


points = st.lists(
    st.fixed_dictionaries(
        {
            "cache_bytes_per_token": st.integers(1, 5),
            "kl_nats": st.integers(0, 5).map(float),
            "name": st.sampled_from("abc"),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(points)
def test_the_front_is_what_no_point_beats(points):
    found = with_front({"points": points})["points"]
    assert [{**x, "on_front": None} for x in found] == sorted(
        ({**x, "on_front": None} for x in points),
        key=lambda x: (-x["cache_bytes_per_token"], x["kl_nats"], x["name"]),
    )
    front = [x for x in found if x["on_front"]]
    assert front
    for x in found:
        beaten = any(
            y["cache_bytes_per_token"] <= x["cache_bytes_per_token"]
            and y["kl_nats"] <= x["kl_nats"]
            and (y["cache_bytes_per_token"], y["kl_nats"]) != (x["cache_bytes_per_token"], x["kl_nats"])
            for y in found
        )
        assert x["on_front"] != beaten


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-heads", "3"), "--kv-heads: "),
        (("--ranks", "999", "--rope-dim", "4"), "--rank: "),
        (("--ranks", "12", "--rope-dim", "3"), "--rope-dim: "),
        (("--caches", "0"), "--cache: "),
        (
            ("--kv-heads", "4,2,1", "--stores", "fp32,fp16,bf16,int8"),
            "--stores: expected at most 12 points, got 16: 4 sizes with the source, in 4 stores; leave some",
        ),
    ],
)
def test_a_wrong_size_is_refused_before_any_work(source, tmp_path, capsys, options, said):
    assert main(words(source, tmp_path / "out", *options)) == 2
    error = capsys.readouterr().err
    assert f"python -m attnlib sweep: {said}" in error
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", ["0", "4,", "4;2", "-1", "four"])
def test_a_list_of_counts_is_parsed_strictly(source, tmp_path, capsys, value):
    with pytest.raises(SystemExit) as stopped:
        main(words(source, tmp_path / "out", f"--kv-heads={value}"))
    assert stopped.value.code == 2
    assert "expected positive counts such as 4,2, got" in capsys.readouterr().err


def test_an_unknown_store_is_named(source, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(words(source, tmp_path / "out", "--stores", "bf16,int4"))
    assert "expected names among fp32, fp16, bf16, int8, fp8, got int4" in capsys.readouterr().err


def test_a_folder_with_other_files_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    for out, said in (
        (tmp_path / "out", "OUT: expected a new folder or an earlier sweep"),
        (tmp_path / "out/mine", "OUT: expected a folder or an unused path"),
        (tmp_path / "gone/out", "OUT: expected a writable parent folder"),
        (source / "out", "OUT: expected a folder outside the source"),
    ):
        assert main(words(source, out)) == 2
        assert said in capsys.readouterr().err
    assert files_of(tmp_path / "out") == {"mine": b"x"}


def test_a_source_that_is_not_finite_is_refused(tmp_path, capsys):
    from safetensors.torch import save_file

    source = save(tmp_path / "model", "llama", attention_bias=False)
    (tmp_path / "prose.txt").write_text(TEXT[:700])
    (tmp_path / "code.txt").write_text(TEXT[700:])
    path = next(iter(sorted(source.glob("*.safetensors"))))
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert main([*words(source, tmp_path / "out"), "--quiet"]) == 3
    assert not (tmp_path / "out").exists()
