"""What is measured to share a cache: each layer once, of little text, and kept for a run that goes on."""

import errno
import json
import signal
import subprocess
import sys

import pytest
import torch
from checkpoint_helpers import contents
from fault_shim import FaultyOs, failing, killed
from model_helpers import add_tokenizer
from stopped_runs import in_a_process
from transformers import AutoModelForCausalLM, LlamaConfig

import attnlib
from attnlib.__main__ import main
from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.checkpoint import convert, writing
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.own import latent, measuring, sizes
from attnlib.convert.own.grouped import GroupedKind
from attnlib.convert.own.latent import LatentKind
from attnlib.convert.own.measuring import found_on, nats_together
from attnlib.convert.text import kept
from attnlib.convert.text.stored import LayerFolder

LAYERS = 3
KINDS = [("--layers", "gqa"), ("--rope-dim", "8")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small model in which every weight shows, and its tokenizer."""
    torch.manual_seed(0)
    tiny = {"vocab_size": 130, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**tiny, **heads))
    with torch.no_grad():
        for x in model.parameters():
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5 if x.dim() > 1 else 1.0)
    folder = tmp_path_factory.mktemp("measured") / "in"
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def run(source, out, *options):
    fixed = ("--to", "attnlib", "--cache", "62%", "--samples", 4, "--length", 16, "--quiet")
    return main([str(x) for x in ("convert", source, out, *fixed, "--max-shard-size", "12KB", *options)])


def passes_of(monkeypatch):
    """The passes over a text that are made from now on."""
    seen, honest = [], sizes.found_on
    monkeypatch.setattr(sizes, "found_on", lambda *given, **named: seen.append(1) or honest(*given, **named))
    return seen


def measured_in(folder):
    return sorted(folder.glob("*calibration*/measured-*.json"))


@pytest.fixture
def restored(monkeypatch):
    """What the class does to write down measures is as before when the test ends."""
    monkeypatch.setattr(LayerFolder, "remember", LayerFolder.remember)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@torch.no_grad()
def test_a_layer_matters_as_much_as_a_model_differs_in_which_it_alone_is_smaller(tmp_path, source, kind):
    model = read_model(read_folder(source))
    if kind == "gqa":
        made, small, whole = GroupedKind(model, None, "cpu", {"merge": "mean"}), 1, 4
    else:
        made, small, whole = (
            LatentKind(model, None, "cpu", {"rope_dim": 16, "q_rank": None, "reach": 64}),
            3,
            16,
        )
    tokens = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(2))
    expected = AutoModelForCausalLM.from_pretrained(source)(tokens).logits.log_softmax(-1)
    found = found_on(made, [(small, whole)] * LAYERS, tokens).nats
    for index in range(LAYERS):
        sizes = [small if layer == index else whole for layer in range(LAYERS)]
        convert(
            source, tmp_path / str(index), made.converter(sizes), settings={"sizes": sizes}, progress=False
        )
        said = attnlib.load_pretrained(tmp_path / str(index))(tokens).logits.log_softmax(-1)
        apart = (expected.exp() * (expected - said)).sum(-1).mean()
        assert found[index][small] == pytest.approx(float(apart), rel=1e-3, abs=1e-6)
        assert found[index][whole] == pytest.approx(0, abs=1e-6)


@torch.no_grad()
def test_models_side_by_side_differ_from_the_source_as_they_do_when_loaded(tmp_path, source):
    model = read_model(read_folder(source))
    kind = LatentKind(model, None, "cpu", {"rope_dim": None, "q_rank": None, "reach": 64})
    kinds = kind.alternatives(19 * 4 * LAYERS)
    assert [x.options["rope_dim"] for x in kinds] == [16, 4, 6, 8, 12]
    chosen = [sizes.equal_sizes(x, 19 * 4 * LAYERS) for x in kinds]
    assert chosen == [[19 - x.options["rope_dim"]] * LAYERS for x in kinds]
    tokens = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(2))
    expected = AutoModelForCausalLM.from_pretrained(source)(tokens).logits.log_softmax(-1)
    for n, nats in enumerate(nats_together(kinds, chosen, tokens)):
        settings = {"sizes": chosen[n]}
        convert(source, tmp_path / str(n), kinds[n].converter(chosen[n]), settings=settings, progress=False)
        said = attnlib.load_pretrained(tmp_path / str(n))(tokens).logits.log_softmax(-1)
        apart = (expected.exp() * (expected - said)).sum(-1).mean()
        assert nats == pytest.approx(float(apart), rel=1e-3)


def test_a_budget_chooses_the_rotary_channels_once(tmp_path, source, monkeypatch):
    keep, calls = ("--keep-calibration", tmp_path / "kept"), []
    monkeypatch.setattr(
        sizes, "nats_together", lambda kinds, *_, **__: calls.append(kinds) or [3.0, 2.0, 1.0, 2.0, 1.0]
    )
    for name in ("a", "b"):
        assert run(source, tmp_path / name, *keep) == 0
    assert len(calls) == 1
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    report = json.loads((tmp_path / "a/conversion_report.json").read_text())
    assert report["settings"]["rope_dim"] == 6
    assert {form["qk_rope_head_dim"] for form in own_layers(tmp_path / "a")} == {6}
    assert report["cache_bytes_per_token"]["after"] <= 0.62 * report["cache_bytes_per_token"]["before"]
    for options in (("--rope-dim", 8), ("--layers", "gqa")):
        assert run(source, tmp_path / str(options[1]), *keep, *options) == 0
    assert len(calls) == 1


def test_a_small_budget_has_room_for_few_rotary_channels(tmp_path, source):
    """16, the default of this model, would leave no room for a latent."""
    assert run(source, tmp_path / "out", "--cache", "40%") == 0
    assert {form["qk_rope_head_dim"] for form in own_layers(tmp_path / "out")} < {2, 4, 6, 8}


def own_layers(folder):
    return json.loads((folder / "config.json").read_text())["layers"]


def test_little_of_a_long_text_is_read(source, monkeypatch):
    model, seen = read_model(read_folder(source)), []
    honest = measuring.TextLayers.embedded
    monkeypatch.setattr(
        measuring.TextLayers, "embedded", lambda self, x: seen.append(x.shape) or honest(self, x)
    )
    monkeypatch.setattr(measuring, "TOKENS", 20)
    made = GroupedKind(model, None, "cpu", {"merge": "mean"})
    for shape in ((3, 12), (1, 50), (40, 2)):
        found_on(made, [(1,)] * LAYERS, torch.full(shape, 5))
    assert [*map(tuple, seen)] == [(1, 12), (1, 20), (10, 2)]


def test_a_layer_is_decomposed_once_to_be_measured(tmp_path, source, restored, monkeypatch):
    seen, honest, remember = [], latent.Spectrum.of, LayerFolder.remember
    monkeypatch.setattr(latent.Spectrum, "of", lambda *given: seen.append("decomposed") or honest(*given))
    monkeypatch.setattr(LayerFolder, "remember", lambda *given: seen.append("measured") or remember(*given))
    assert run(source, tmp_path / "out", "--rope-dim", 8) == 0
    assert seen.index("measured") == LAYERS


@pytest.mark.parametrize("options", KINDS)
def test_a_run_that_goes_on_does_not_measure_again(tmp_path, source, monkeypatch, options):
    honest, asked = LayerFolder.calibration, []

    def interrupting(self, index):
        if measured_in(tmp_path) and asked.append(index) is None and len(asked) == 3:
            raise KeyboardInterrupt
        return honest(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(LayerFolder, "calibration", interrupting)
        assert run(source, tmp_path / "out", *options) == 130
    passes = passes_of(monkeypatch)
    assert run(source, tmp_path / "out", *options) == 0
    assert passes == []
    assert run(source, tmp_path / "whole", *options) == 0
    assert passes == [1]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_another_question_is_measured_for_itself(tmp_path, source, monkeypatch):
    keep, passes = ("--keep-calibration", tmp_path / "kept", "--overwrite"), passes_of(monkeypatch)
    asked = (*KINDS, ("--rope-dim", 12), ("--rope-dim", 8, "--reach", 9), ("--rope-dim", 8, "--cache", "90%"))
    for count, options in enumerate(asked, 1):
        assert run(source, tmp_path / "out", *keep, *options) == 0
        assert len(passes) == count
    monkeypatch.setattr(sizes, "VERSION", 2)
    for _ in range(2):
        assert run(source, tmp_path / "out", *keep, *options) == 0
        assert len(passes) == len(measured_in(tmp_path / "kept")) == len(asked) + 1


def digit(path):
    data = path.read_text()
    at = data.index("0.") + 3
    path.write_text(data[:at] + str((int(data[at]) + 1) % 10) + data[at + 1 :])


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_text("{}")


def link(path):
    path.symlink_to(path.rename(path.with_name("measured-elsewhere")).name)


@pytest.mark.parametrize("damage", [digit, cut, empty, link])
def test_what_cannot_be_believed_is_measured_again(tmp_path, source, monkeypatch, damage):
    keep, passes = ("--keep-calibration", tmp_path / "kept"), passes_of(monkeypatch)
    assert run(source, tmp_path / "a", *keep, *KINDS[1]) == 0
    [path] = measured_in(tmp_path / "kept")
    before = path.read_bytes()
    damage(path)
    assert run(source, tmp_path / "b", *keep, *KINDS[1]) == 0
    assert len(passes) == 2
    assert path.read_bytes() == before
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def remembering(at=None, fault=print):
    """From now on calls that change files are counted while what was measured is written down, and one has a
    fault.
    """
    shim, honest = FaultyOs(at, fault), LayerFolder.remember

    def remember(self, *given):
        real, writing.os = writing.os, shim
        try:
            honest(self, *given)
        finally:
            writing.os = real

    LayerFolder.remember = remember
    return shim


def killed_run(source, out, at):
    """A run that is killed at one call, for a process of its own."""
    torch.set_num_threads(1)
    remembering(at, killed)
    run(source, out, *KINDS[1])


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_kill_while_it_is_written_down_is_gone_on_with(tmp_path, source, restored, every):
    shim = remembering()
    assert run(source, tmp_path / "whole", *KINDS[1]) == 0
    assert shim.count >= 5  # to unlink, open, write, sync and rename
    for at in range(1, shim.count, every):
        out = tmp_path / str(at)
        assert in_a_process(killed_run, source, out, at) == -signal.SIGKILL
        assert run(source, out, *KINDS[1]) == 0
        assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(("code", "exit_code"), [(errno.ENOSPC, 5), (errno.EIO, 1)])
def test_a_failing_disk_says_so_and_is_gone_on_with(
    tmp_path, source, restored, monkeypatch, capsys, code, exit_code
):
    with monkeypatch.context() as patch:
        patch.setattr(LayerFolder, "remember", LayerFolder.remember)
        remembering(1, failing(code))
        assert run(source, tmp_path / "out") == exit_code
    assert "finished calibrations are kept" in capsys.readouterr().err
    assert run(source, tmp_path / "out") == 0


def test_where_another_run_has_the_folder_nothing_is_kept(tmp_path, source, monkeypatch):
    honest = kept.only_one

    def held(folder):
        if folder.is_dir():  # which it is not before calibrations are made
            raise kept.RequestError("held")
        return honest(folder)

    monkeypatch.setattr(kept, "only_one", held)
    assert run(source, tmp_path / "out", "--keep-calibration", tmp_path / "kept") == 0
    assert len([*(tmp_path / "kept").glob("calibration-*/layer-*")]) == LAYERS
    assert not measured_in(tmp_path / "kept")


BRANCHES = """if True:
    import torch
    from attnlib.convert.own import measuring

    class Head:
        words = 3 * measuring.WORDS
        take = lambda self, first, last: None
        __call__ = lambda self, x: (
            x[:, :1].expand(-1, measuring.WORDS) * torch.linspace(0, 1, measuring.WORDS)
        )

    def taken():
        [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    # When this is freed, glibc serves blocks below its 30 MB from the heap, as in any conversion.
    torch.empty(7_500_000)
    path = [torch.randn(1, 512, 4)]
    apart = [{size: [path[0] + size] for size in (1, 2)} for _ in range(8)]
    before = taken()
    measuring._nats(Head(), torch.nn.Identity(), path, apart)
    print(taken() - before)
"""


def test_models_that_are_compared_leave_no_holes_in_memory():
    """Of logits, between sums that stay: hundreds of megabytes here, and gigabytes of a model of 30
    layers.
    """
    done = subprocess.run([sys.executable, "-c", BRANCHES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 2**20
