"""Folders in and out: what is converted, copied, reported and verified, and where a result may go."""

import hashlib
import json
import os

import pytest
import torch
from checkpoint_helpers import CONFIG, contents, halve, llama, write_checkpoint
from safetensors.torch import load_file, save_file

from attnlib.convert.checkpoint import (
    CheckpointError,
    ConvertedLayer,
    OutputError,
    RequestError,
    VerificationError,
    convert,
    folder,
    identity,
)

REPORT = "conversion_report.json"


def load(folder):
    """All tensors of a folder."""
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def run(source, out, convert_layer=halve, **options):
    return convert(source, out, convert_layer, progress=False, **options)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_identity_keeps_every_tensor(tmp_path, shards, dtype):
    tensors = llama(dtype=dtype)
    run(
        write_checkpoint(tmp_path / "in", tensors, shards=shards),
        tmp_path / "out",
        identity,
        max_shard_size=3000,
    )
    kept = load(tmp_path / "out")
    assert kept.keys() == tensors.keys()
    assert all(kept[name].dtype == x.dtype and kept[name].equal(x) for name, x in tensors.items())
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "in/tokenizer.json").read_bytes()


def test_layers_are_converted_and_the_rest_is_not(tmp_path):
    tensors = llama()
    report = run(write_checkpoint(tmp_path / "in", tensors, shards=3), tmp_path / "out", max_shard_size=4000)
    kept = load(tmp_path / "out")
    for name, x in tensors.items():
        new = x.unflatten(0, (2, 2, 4)).mean(1).flatten(0, 1) if "k_proj" in name or "v_proj" in name else x
        torch.testing.assert_close(kept[name], new, rtol=0, atol=0)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == CONFIG | {"num_key_value_heads": 2, "head_dim": 4}
    assert json.loads((tmp_path / "out" / REPORT).read_text()) == report
    assert report["cache_bytes_per_token"] == {"before": 3 * 2 * 16 * 4, "after": 3 * 2 * 8 * 4}
    assert [row["layer"] for row in report["layers"]] == [0, 1, 2]
    assert all(row["k"] > 0 for row in report["layers"])
    assert report["verified"]
    assert report["check"] == "none"


def test_the_index_names_the_shard_of_every_tensor(tmp_path):
    run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", max_shard_size=3000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    held = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert {name: file for file, tensors in held.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for tensors in held.values() for x in tensors.values()
    )
    assert len(held) > 2
    assert all(sum(x.nbytes for x in tensors.values()) <= 3000 for tensors in held.values())


def test_a_layer_is_converted_once_though_it_lies_in_several_shards(tmp_path):
    seen = []

    def counting(weights, shape):
        seen.append(shape.index)
        return halve(weights, shape)

    run(write_checkpoint(tmp_path / "in", llama(), shards=4), tmp_path / "out", counting, max_shard_size=1100)
    assert seen == [0, 1, 2]


def test_elements_of_different_widths_lie_aligned(tmp_path):
    tensors = llama(dtype=torch.bfloat16) | {
        "a": torch.tensor([True, False, True]),
        "b": torch.randn(3).double(),
        "c": torch.randn(5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "m.float8": torch.randn(3).to(torch.float8_e4m3fn),
    }
    run(write_checkpoint(tmp_path / "in", tensors), tmp_path / "out")
    kept = load(tmp_path / "out")  # safetensors refuses what lies askew
    for name in ("a", "b", "c", "empty", "scalar", "m.float8"):
        assert kept[name].dtype == tensors[name].dtype
        assert kept[name].shape == tensors[name].shape
        assert kept[name].flatten().view(torch.uint8).equal(tensors[name].flatten().view(torch.uint8)), name


def test_the_report_names_every_input_and_output(tmp_path):
    source = write_checkpoint(
        tmp_path / "in", llama(), CONFIG | {"auto_map": {"AutoModel": "evil.py"}}, shards=2
    )
    (source / "evil.py").write_text("raise SystemExit")
    (source / "optimizer.bin").write_text("no")
    report = run(source, tmp_path / "out")

    def sha256(files):
        return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    inputs = {
        name: data for name, data in contents(source).items() if name not in ("evil.py", "optimizer.bin")
    }
    assert {name: file["sha256"] for name, file in report["inputs"].items()} == sha256(inputs)
    outputs = {name: data for name, data in contents(tmp_path / "out").items() if name != REPORT}
    assert report["outputs"] == sha256(outputs)
    assert report["not_copied"] == ["evil.py", "optimizer.bin"]
    assert report["config_keys_dropped"] == ["auto_map"]
    assert report["config_changes"] == {"num_key_value_heads": 2, "head_dim": 4}
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())


def test_the_same_request_gives_the_same_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    for name in ("a", "b"):
        run(source, tmp_path / name, max_shard_size=2000, settings={"merge": ("mean", 2)})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "in"]


def test_files_get_the_modes_that_new_files_get(tmp_path):
    old = os.umask(0o027)
    try:
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_unknown_tensors_of_an_attention_are_copied_and_listed(tmp_path):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    report = run(write_checkpoint(tmp_path / "in", llama() | {name: torch.ones(2)}), tmp_path / "out")
    assert report["attention_tensors_copied_as_they_are"] == [name]
    assert load(tmp_path / "out")[name].equal(torch.ones(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named_and_needs_a_word(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(folder, "CHUNK", 64)  # a row
    tensors = llama()
    tensors["model.layers.1.mlp.up_proj.weight"][3:5, 4] = bad
    tensors["model.norm.weight"][:2] = bad
    source = write_checkpoint(tmp_path / "in", tensors, shards=2)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .*: 2.*allow_nonfinite") as error:
        run(source, tmp_path / "out")
    assert "up_proj" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    report = run(source, tmp_path / "out", allow_nonfinite=True)
    kind = "nan" if bad != bad else "inf"
    assert report["not_finite"] == {
        "model.layers.1.mlp.up_proj.weight": {kind: 2},
        "model.norm.weight": {kind: 2},
    }
    assert load(tmp_path / "out")["model.norm.weight"].isfinite().sum() == 14


def test_a_converter_that_makes_nan_of_numbers_is_found_out(tmp_path):
    def broken(weights, shape):
        return ConvertedLayer(dict(weights) | {"o_proj.weight": weights["o_proj.weight"] / 0})

    with pytest.raises(VerificationError, match=r"o_proj\.weight: expected finite"):
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", broken)
    assert not (tmp_path / "out").exists()


def test_a_converter_whose_config_and_weights_differ_is_found_out(tmp_path):
    def lying(weights, shape):
        return ConvertedLayer(halve(weights, shape).weights, {"num_key_value_heads": 4})

    with pytest.raises(VerificationError, match=r"k_proj\.weight: expected \[16, 16\].*got \[8, 16\]"):
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", lying)


def test_layers_stored_alike_must_come_out_alike(tmp_path):
    def uneven(weights, shape):
        return halve(weights, shape) if shape.index < 2 else ConvertedLayer(weights)

    with pytest.raises(VerificationError, match=r"layers\.2\.self_attn\.k_proj\.weight: expected"):
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", uneven)


def test_a_latent_layer_is_stored_by_its_own_names(tmp_path):
    def latent(weights, shape):
        new = {"q_proj.weight": torch.randn(24, 16), "kv_a_proj_with_mqa.weight": torch.randn(10, 16)}
        config = {"kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4}
        return ConvertedLayer(new | {"o_proj.weight": weights["o_proj.weight"]}, config)

    report = run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", latent)
    kept = {name for name in load(tmp_path / "out") if "layers.2.self_attn" in name}
    expected = {"q_proj", "kv_a_proj_with_mqa", "o_proj"}
    assert kept == {f"model.layers.2.self_attn.{name}.weight" for name in expected}
    assert report["cache_bytes_per_token"]["after"] == 3 * 10 * 4


def test_a_failed_check_keeps_the_result_marked(tmp_path):
    def check(folder, errors):
        assert load(folder)
        assert errors.keys() == {"0", "1", "2"}
        raise VerificationError("logits differ by 3")

    with pytest.raises(VerificationError, match="logits differ by 3") as error:
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", check=check)
    assert error.value.exit_code == 4
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert (report["verified"], report["check"], report["reason"]) == (False, "failed", "logits differ by 3")


def test_a_passed_check_reports_its_measures(tmp_path):
    source = write_checkpoint(tmp_path / "in", llama())
    report = run(source, tmp_path / "out", check=lambda folder, errors: {"logits": 0.5})
    assert (report["verified"], report["check"], report["measures"]) == (True, "passed", {"logits": 0.5})


def places(root):
    """Where no result may go, made when it is asked for."""
    (root / "full").mkdir()
    (root / "full/file").write_text("precious")
    (root / "file").write_text("precious")
    (root / "empty").mkdir()
    (root / "link").symlink_to(root / "empty")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "to_source").symlink_to(root / "in")
    names = (
        "in",
        "in/out",
        "to_source/out",
        "full",
        "file",
        "link",
        "dangling",
        "absent/out",
        ".",
        "to_source",
    )
    return [root / name for name in names]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", range(10))
def test_a_result_goes_nowhere_else(tmp_path, number, overwrite):
    source = write_checkpoint(tmp_path / "in", llama())
    place = places(tmp_path)[number]
    before = contents(tmp_path)
    with pytest.raises(RequestError, match="out: ") as error:
        run(source, place, overwrite=overwrite)
    assert error.value.exit_code == 2
    assert contents(tmp_path) == before


def test_a_source_inside_the_target_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    source = write_checkpoint(tmp_path / "out/in", llama())
    with pytest.raises(RequestError, match="outside the source"):
        run(source, tmp_path / "out", overwrite=True)


def test_a_read_only_parent_is_refused(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in", llama())
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(
        OutputError, match=r"a writable parent folder, .* read-only; choose another OUT"
    ) as error:
        run(source, tmp_path / "out")
    assert error.value.exit_code == 1


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out")
    assert (tmp_path / "out" / REPORT).exists()


def test_overwriting_replaces_an_earlier_result_whole(tmp_path):
    source = write_checkpoint(tmp_path / "in", llama())
    run(source, tmp_path / "out", max_shard_size=1500)
    run(source, tmp_path / "once")
    run(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "once")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "once", "out"]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "5GB"])
def test_a_shard_size_is_a_number_of_bytes(tmp_path, size):
    with pytest.raises(RequestError, match="max_shard_size"):
        run(write_checkpoint(tmp_path / "in", llama()), tmp_path / "out", max_shard_size=size)


def test_the_bar_counts_every_byte(tmp_path, capsys):
    convert(
        write_checkpoint(tmp_path / "in", llama(), shards=2), tmp_path / "out", halve, max_shard_size=3000
    )
    bar = capsys.readouterr().err
    assert "100%" in bar
    assert "verifying" in bar


def test_tensors_keep_their_places_in_the_layout_of_a_resaved_source(tmp_path):
    """What safetensors makes of the same tensors in another order is converted to the same bytes."""
    tensors = llama()
    one, two = (
        write_checkpoint(tmp_path / name, x)
        for name, x in (("a", tensors), ("b", dict(sorted(tensors.items()))))
    )
    save_file(dict(reversed(tensors.items())), two / "model.safetensors")
    run(one, tmp_path / "one"), run(two, tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()
