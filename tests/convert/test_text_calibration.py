"""Calibrations over text, a layer at a time: as of a whole model, in any order, and with what sources
lack.
"""

import gc
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from family_models import DECODERS, RECENT, make, slow
from model_helpers import SIZES, TEXT, add_tokenizer, load, save
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from attnlib.checkpoint_files.folder import SourceFile, read_folder
from attnlib.convert import Calibration, CheckpointError, RequestError
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.text import layerwise
from attnlib.convert.text.layers import TextLayers
from attnlib.convert.text.layerwise import TextCalibration
from attnlib.convert.text.tokens import read_text, tokens_of
from attnlib.models.families import STORED


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {
        kind: save(tmp_path_factory.mktemp(kind) / "in", kind)
        for kind in ("llama", "mistral", "qwen2", "qwen3")
    }


def streamed(folder, tokens, device="cpu"):
    return TextCalibration(read_model(read_folder(folder)), tokens, device)


def observed(folder, tokens):
    """The inputs of every layer's attention in the whole model."""
    model, inputs = load(folder).float(), [[] for _ in range(SIZES["num_hidden_layers"])]
    for layer, seen in zip(model.model.layers, inputs, strict=True):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named, seen=seen: seen.append(named["hidden_states"]), with_kwargs=True
        )
    with torch.no_grad():
        model(tokens)
    return inputs


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_is_what_the_whole_model_sees(sources, kind):
    """Windows of five tokens in Mistral and in the last two layers of Qwen 2 among them."""
    tokens = tokens_of(sources[kind], TEXT, samples=5, length=33)
    calibrations = streamed(sources[kind], tokens)
    for index, inputs in enumerate(observed(sources[kind], tokens)):
        wanted, got = Calibration.of(inputs), calibrations(index)
        assert got.tokens == wanted.tokens == 5 * 33
        scale = wanted.moment.diagonal().sqrt()
        difference = (got.moment - wanted.moment).abs() / scale / scale[:, None]
        assert difference.max() < 2**-18  # fp32 sums of a hundred terms, through three layers


@pytest.mark.parametrize("kind", [*DECODERS, *slow(*RECENT)])
def test_every_family_is_run_as_it_is_whole(tmp_path, kind):
    """What its query projection reads, fused with others or not, under learned positions or rope."""
    model, seen = make(kind), []
    model.save_pretrained(tmp_path)
    family = STORED[kind]
    reads = re.compile(rf"{family.stem}{family.path}\.{family.weights[0][0]}")
    for module in (module for name, module in model.named_modules() if reads.fullmatch(name)):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = torch.arange(3, 3 + 22).view(2, 11)
    with torch.no_grad():
        model(tokens)
    calibrations = streamed(tmp_path, tokens)
    for index, x in zip(calibrations.model.layers, seen, strict=True):
        torch.testing.assert_close(
            calibrations(index).moment, Calibration.of([x]).moment, rtol=1e-4, atol=1e-4
        )


def test_weights_of_sixteen_bits_are_run_in_fp32(tmp_path):
    source = save(tmp_path / "in", "llama", dtype="bfloat16")
    tokens = tokens_of(source, TEXT, samples=2, length=20)
    wanted = Calibration.of(observed(source, tokens)[2]).moment
    torch.testing.assert_close(streamed(source, tokens)(2).moment, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("index", range(3))
def test_a_gpu_rounds_factors_to_eleven_bits(tmp_path, index):
    """In products of layers alone: the first layer reads what the embedding has."""
    source = save(tmp_path / "in", "llama", dtype="bfloat16")
    tokens = tokens_of(source, TEXT, samples=5, length=33)
    wanted, got = (streamed(source, tokens, device)(index).moment for device in ("cpu", "cuda"))
    off = (got - wanted).norm() / wanted.norm()
    assert off < (2**-18 if index == 0 else 2**-10)
    assert index == 0 or off > 2**-18  # which is fp32's


def test_precision_is_changed_on_a_gpu_alone_and_comes_back(sources, monkeypatch):
    tokens, seen = tokens_of(sources["llama"], TEXT, samples=2, length=20), []
    monkeypatch.setattr(
        layerwise, "observe", lambda *_, **__: seen.append(torch.get_float32_matmul_precision()) or 1 / 0
    )
    for device in ("cpu", "cuda"):
        calibrations = streamed(sources["llama"], tokens)
        calibrations.layers.embedded(tokens)
        calibrations._states, calibrations.device = [], device
        with pytest.raises(ZeroDivisionError):
            calibrations._next(0)
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["highest", "high"]


def test_of_the_embedding_what_occurs_is_read_and_no_more(tmp_path, monkeypatch):
    source, tokens = (
        save(tmp_path / "in", "llama", dtype="bfloat16"),
        torch.tensor([[70, 3, 4, 5], [129, 4, 70, 0]]),
    )
    layers, read = TextLayers(read_folder(source)), []
    honest = SourceFile.read
    monkeypatch.setattr(SourceFile, "read", lambda *given: read.append(given[2]) or honest(*given))
    states = torch.cat(layers.embedded(tokens))
    assert read == [2 * 24 * rows for rows in (1, 3, 1, 1)]  # 0; 3, 4 and 5; 70; 129
    assert states.equal(load(source).model.embed_tokens(tokens).float())


def test_any_order_gives_the_same_bits(sources):
    tokens = tokens_of(sources["llama"], TEXT, samples=3, length=20)
    calibrations = streamed(sources["llama"], tokens)
    in_order = [calibrations(index).moment for index in range(3)]
    jumping = streamed(sources["llama"], tokens)
    for index in (2, 0, 0, 1, 2, 2, 1):
        assert jumping(index).moment.equal(in_order[index])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_any_number_of_threads_gives_the_same_bits(sources, kind):
    tokens = tokens_of(sources[kind], TEXT, samples=7, length=31)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            calibrations = streamed(sources[kind], tokens)
            found.append([calibrations(index) for index in range(3)])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.moment.equal(other.moment)
            assert one.sample.equal(other.sample)


def test_it_goes_on_behind_any_layer(sources):
    tokens = tokens_of(sources["mistral"], TEXT, samples=3, length=20)
    whole = streamed(sources["mistral"], tokens)
    for index in range(2):
        whole(index)
        later = streamed(sources["mistral"], tokens)
        later.go_on(index + 1, whole.states)
        assert later(2).moment.equal(streamed(sources["mistral"], tokens)(2).moment)


def test_one_layer_has_weights_at_a_time(sources):
    loaded, others = [], decoder_layers()
    tokens = tokens_of(sources["llama"], TEXT, samples=2, length=8)
    model = read_model(read_folder(sources["llama"]))
    calibrations = TextCalibration(model, tokens, advance=lambda: loaded.append(with_weights(others)))
    for index in (0, 1, 2, 0):
        calibrations(index)
        assert with_weights(others) == 0
    assert loaded == [1] * 2 * 4


def test_free_memory_is_given_back_behind_each_layer(sources, monkeypatch):
    """When its weights have gone, or the pages that they were in would not be free."""
    others, given = decoder_layers(), []
    monkeypatch.setattr(layerwise, "give_back", lambda: given.append(with_weights(others)))
    tokens = tokens_of(sources["llama"], TEXT, samples=2, length=8)
    streamed(sources["llama"], tokens)(2)
    assert given == [0] * 3


def decoder_layers():
    """Those in memory, which are kept there as long as the list is: the next test's have other places."""
    return [x for x in gc.get_objects() if type(x) is LlamaDecoderLayer]


def with_weights(others):
    """How many decoder layers there are in memory beside ``others`` whose weights are."""
    known = {id(layer) for layer in others}
    layers = [x for x in decoder_layers() if id(x) not in known]
    return sum(not any(weight.is_meta for weight in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_calibration_that_is_left_at_exit_is_silent(sources, index):
    """Behind the first layer, which is not the last, and behind the last."""
    program = f"""
from pathlib import Path

import torch
from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.text.layerwise import TextCalibration
model = read_model(read_folder(Path({str(sources["llama"])!r})))
calibrations = TextCalibration(model, torch.full((2, 9), 5))
calibrations({index})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_layer_that_fails_keeps_no_weights(tmp_path, sources):
    folder = changed(
        tmp_path, sources["llama"], lambda x: x["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan)
    )
    others = decoder_layers()
    calibrations = streamed(folder, tokens_of(folder, TEXT, samples=1, length=30))
    with pytest.raises(CheckpointError, match="layer 2, over text"):
        calibrations(2)
    assert with_weights(others) == 0


def test_tokens_are_the_first_of_the_text(sources):
    tokens = tokens_of(sources["llama"], TEXT, samples=3, length=7)
    assert tokens.flatten().tolist() == [ord(letter) for letter in TEXT[:21]]
    assert tokens_of(sources["llama"], TEXT[:20], samples=3, length=7).shape == (2, 7)
    spaces = " " * 10_000 + TEXT[:30]  # which are unknown, and tokens all the same
    assert tokens_of(sources["llama"], spaces, samples=1, length=9).tolist() == [[0] * 9]


def test_a_text_of_few_tokens_is_read_on(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "in")
    path = tmp_path / "in/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(tokenizer))
    assert tokens_of(tmp_path / "in", ("x" * 99 + " ") * 50, samples=6, length=7).shape == (6, 7)


@pytest.mark.parametrize(("samples", "length"), [(0, 5), (5, 0), (-1, 5), (True, 5), (2.0, 5)])
def test_counts(sources, samples, length):
    with pytest.raises(RequestError, match=r"(samples|length): expected a positive count"):
        tokens_of(sources["llama"], TEXT, samples=samples, length=length)


def test_a_text_that_is_too_short(sources):
    with pytest.raises(RequestError, match="text: expected at least length=50 tokens, got 49"):
        tokens_of(sources["llama"], TEXT[:49], samples=1, length=50)


def test_a_text_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(RequestError, match=r"UTF-8 in .*at byte 3"):
        read_text(tmp_path / "latin")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RequestError, match="text: expected a readable file"):
            read_text(path)


def test_a_source_without_a_tokenizer_that_opens(tmp_path):
    with pytest.raises(CheckpointError, match="expected the model's own tokenizer"):
        tokens_of(tmp_path, TEXT, samples=1, length=5)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json.*: expected a tokenizer that transformers opens"
    ):
        tokens_of(tmp_path, TEXT, samples=1, length=5)


def test_a_tokenizer_is_read_from_its_folder_alone(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    assert tokens_of(tmp_path / "in", "abc", samples=1, length=3).tolist() == [[97, 98, 99]]
    (tmp_path / "in/tokenizer.json").rename(tmp_path / "outside")
    (tmp_path / "in/tokenizer.json").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* got another link"):
        tokens_of(tmp_path / "in", "abc", samples=1, length=3)


def test_a_tokenizer_of_a_stranger_runs_no_code(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "in")
    (tmp_path / "in/evil.py").write_text("raise SystemExit('ran')")
    for name, field in (("tokenizer_config.json", ["evil.Tokenizer", None]), ("config.json", "evil.Config")):
        settings = json.loads((tmp_path / "in" / name).read_text())
        kind = "AutoTokenizer" if "tokenizer" in name else "AutoConfig"
        (tmp_path / "in" / name).write_text(json.dumps(settings | {"auto_map": {kind: field}}))
    tokens = tokens_of(tmp_path / "in", TEXT, samples=1, length=5)
    assert streamed(tmp_path / "in", tokens)(0).tokens == 5


def changed(tmp_path, source, change):
    """A copy of a source whose tensors ``change`` has changed, in one file."""
    shutil.copytree(source, tmp_path / "in")
    tensors = {}
    for path in (tmp_path / "in").glob("*.safetensors*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    change(tensors)
    save_file(tensors, tmp_path / "in/model.safetensors")
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("name", "new", "match"),
    [
        ("layers.1.mlp.up_proj.weight", None, r"up_proj\.weight: required to run the model over text"),
        ("embed_tokens.weight", None, r"embed_tokens\.weight: expected once, next to the layers"),
        (
            "layers.2.mlp.up_proj.weight",
            torch.ones(3, 24),
            r"expected mlp.up_proj.weight \[40, 24\], as transformers.*got \[3, 24\]",
        ),
        (
            "layers.1.mlp.up_proj.weight",
            torch.full((40, 24), torch.nan),
            r"layer 2, over text: moment: expected finite",
        ),
        ("embed_tokens.weight", torch.ones(100, 24), r"expected tokens below 100.*got 1[0-2][0-9]"),
    ],
)
def test_a_source_that_cannot_be_run(tmp_path, sources, name, new, match):
    def change(tensors):
        del tensors[f"model.{name}"]
        if new is not None:
            tensors[f"model.{name}"] = new

    folder = changed(tmp_path, sources["llama"], change)
    tokens = tokens_of(folder, TEXT, samples=1, length=30)
    calibrations = None
    for _ in range(2):  # the same again, and no wrong layer
        with pytest.raises(CheckpointError, match=match):
            (calibrations := calibrations or streamed(folder, tokens))(2)


def test_a_model_that_is_no_decoder(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, vocab_size=90)).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"expected a decoder with an embedding, layers and a norm.*got 'bert'"
    ):
        streamed(tmp_path, torch.ones(1, 5, dtype=torch.int64))(0)


def test_a_config_that_transformers_refuses(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"rms_norm_eps": "small"}))
    add_tokenizer(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"config\.json: rms_norm_eps: expected float, got str small; "):
        streamed(tmp_path / "in", torch.ones(1, 5, dtype=torch.int64))(0)
