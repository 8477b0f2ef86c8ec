"""``attnlib.load_pretrained`` trusts no folder: it reads nothing outside, runs nothing, and makes nothing
larger than it holds.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig, MixtralConfig

import attnlib
from attnlib import checkpoint_files
from attnlib.checkpoint_files.folder import CONFIG, INDEX, WEIGHTS, _weight_map
from attnlib.convert import CheckpointError
from attnlib.finetune import folders
from attnlib.models.own_form import GroupedForm, LatentForm, own_config

LAYERS, GENERATION = 2, "generation_config.json"
SHARDS = tuple(f"model-{n}-of-2.safetensors" for n in (1, 2))


def tiny(**options):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=61, num_key_value_heads=2, max_position_embeddings=64, **sizes, **options)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("loading") / "stock"
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(stock, tmp_path):
    """A copy to break."""
    return shutil.copytree(stock, tmp_path / "folder")


@torch.no_grad()
def logits(model):
    return model(torch.arange(1, 41).view(2, 20)).logits


def change(folder: Path, **fields: object) -> None:
    """Change fields of config.json; one that is None goes."""
    said = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps({name: x for name, x in said.items() if x is not None}))


def raw(folder: Path, text: str) -> None:
    """Put this text behind the opening brace of config.json."""
    (folder / CONFIG).write_text("{" + text + "," + (folder / CONFIG).read_text().strip()[1:])


def reweigh(folder: Path, edit) -> None:
    """Change the tensors."""
    weights = load_file(folder / WEIGHTS)
    weights |= edit(weights) or {}
    save_file(
        {name: x.contiguous().clone() for name, x in weights.items()}, folder / WEIGHTS, {"format": "pt"}
    )


def shard(folder: Path, names=SHARDS, **index: object) -> None:
    """Two files and an index, which lists them by ``names``."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    at = {tensor: n % 2 for n, tensor in enumerate(sorted(weights))}
    for n, name in enumerate(SHARDS):
        save_file(
            {tensor: x for tensor, x in weights.items() if at[tensor] == n}, folder / name, {"format": "pt"}
        )
    said = {"metadata": {}, "weight_map": {tensor: names[n] for tensor, n in at.items()}} | index
    (folder / INDEX).write_text(json.dumps(said))


class Bomb:
    """A pickle that leaves a trace when somebody opens it."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def bomb(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Bomb(folder.parent / "opened")))


def escape(folder: Path, to: str) -> None:
    shard(folder, names=(SHARDS[0], to.format(folder.parent)))
    (folder / SHARDS[1]).rename(folder.parent / "outside.safetensors")


def link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")


def pickled_shard(folder: Path) -> None:
    shard(folder, names=(SHARDS[0], "pytorch_model.bin"))
    bomb(folder, "pytorch_model.bin")


def pickle_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    bomb(folder, "pytorch_model.bin")


def distributed(folder: Path) -> None:
    """Replace the weights by a distributed checkpoint of torch, whose metadata is a pickle."""
    (folder / WEIGHTS).unlink()
    for name in (".metadata", "__0_0.distcp"):
        bomb(folder, name)


def adapter(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "outside")
    said = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "../outside",
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    bomb(folder, "adapter_model.bin")


def adapter_alone(folder: Path) -> None:
    adapter(folder)
    for name in (CONFIG, WEIGHTS):
        (folder / name).unlink()


def own(folder: Path, **fields: object) -> None:
    """attnlib's own form, of the same weights; ``fields`` are of its layers."""
    base = json.loads((folder / CONFIG).read_text())
    said = own_config(base, [GroupedForm(num_key_value_heads=2)] * LAYERS)
    (folder / CONFIG).write_text(json.dumps(said | fields))
    weights = load_file(folder / WEIGHTS)
    named = {name.replace("self_attn.", "self_attn.layer."): x for name, x in weights.items()}
    save_file(named, folder / WEIGHTS, {"format": "pt"})


def latent(pairs: list[int]) -> dict[str, object]:
    form = LatentForm(
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=2 * len(pairs),
        v_head_dim=8,
        rope_pairs=tuple(pairs),
        norm_eps=1e-6,
    )
    return own_config({}, [form])["layers"][0]


def claim(folder: Path, shape: list[int]) -> None:
    """A file that says it holds 64 GiB in a hole, which takes no room."""
    nbytes = 2**36
    field = {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}
    header = json.dumps({"model.embed_tokens.weight": field}).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(folder / WEIGHTS, 8 + len(header) + nbytes)


def beyond(weights):
    """A third layer."""
    stem = "model.layers.1."
    return {name.replace(stem, "model.layers.2."): x for name, x in weights.items() if name.startswith(stem)}


KEY = "model.layers.1.self_attn.k_proj.weight"


def both(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    shard(folder)
    (folder / WEIGHTS).write_bytes(whole)


def pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def named_pickle(folder: Path) -> None:
    bomb(folder, "adapter_model.bin")
    change(folder, transformers_weights="adapter_model.bin")


def own_and_beyond(folder: Path) -> None:
    own(folder)
    reweigh(folder, beyond)


def own_of(folder: Path, **base: object) -> None:
    change(folder, **base)
    own(folder)


def filled(value: float, count: int):
    def edit(weights):
        weights[KEY].view(-1)[:count] = value

    return lambda folder: reweigh(folder, edit)


def as_dtype(dtype: torch.dtype):
    return lambda folder: reweigh(folder, lambda weights: {KEY: weights[KEY].to(dtype)})


def written(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


HOSTILE = {
    # F15: nothing outside, no links, no key twice
    "a shard above": (lambda x: escape(x, "../outside.safetensors"), "weight_map"),
    "an absolute shard": (lambda x: escape(x, "{}/outside.safetensors"), "weight_map"),
    "a shard below": (lambda x: escape(x, "sub/../../outside.safetensors"), "weight_map"),
    "linked weights": (
        lambda x: link(x, WEIGHTS),
        "model.safetensors: expected a plain file .* got another link",
    ),
    "a linked config": (lambda x: link(x, CONFIG), "config.json: expected a plain file .* got another link"),
    "a linked third file": (lambda x: link(x, GENERATION), "generation_config.json: .* got another link"),
    "a key twice": (lambda x: raw(x, '"hidden_size": 64'), "'hidden_size' occurs twice"),
    "a tensor twice": (lambda x: twice(x), "occurs twice"),
    "both kinds of weights": (both, "got both"),
    "a pipe": (pipe, "expected a plain file"),
    # F16: no pickle
    "a pickle in the index": (pickled_shard, "weight_map"),
    "a pickle alone": (pickle_alone, "may run code"),
    "a distributed checkpoint": (distributed, "expected model.safetensors or"),
    "a pickle named by config.json": (named_pickle, "transformers_weights: expected no other files"),
    "an adapter beside": (adapter, "adapter_config.json: expected a complete model"),
    "an adapter that names a folder": (adapter_alone, "expected model.safetensors or"),
    # F17: what is no weight of the model
    "nan": (filled(torch.nan, 2), f"{KEY} {{'nan': 2}}: expected finite"),
    "inf": (filled(-torch.inf, 1), f"{KEY} {{'inf': 1}}: expected finite"),
    "nan eps": (lambda x: raw_field(x, "rms_norm_eps", "NaN"), "NaN is not valid JSON"),
    "infinite eps": (lambda x: raw_field(x, "rms_norm_eps", "1e999"), "1e999 is too large"),
    "int32": (as_dtype(torch.int32), f"{KEY}: expected a floating dtype, got torch.int32"),
    "complex": (as_dtype(torch.complex64), f"{KEY}: expected a floating dtype, got torch.complex64"),
    "a layer too many": (lambda x: reweigh(x, beyond), "got unexpected model.layers.2"),
    "a layer too many in our form": (own_and_beyond, "got unexpected model.layers.2"),
    "a layer too few": (lambda x: change(x, num_hidden_layers=LAYERS + 1), "got missing model.layers.2"),
    "another shape": (lambda x: reweigh(x, lambda w: {KEY: w[KEY][:-1]}), f"got mismatched .*{KEY}"),
    "pairs repeated": (
        lambda x: own(x, layers=[latent([1, 1, 1])] * LAYERS),
        "rope_pairs: expected each pair at most 2",
    ),
    # F18: broken configs, and sizes that nothing holds
    "an array": (written(CONFIG, "[1]"), "expected a JSON object"),
    "deep": (lambda x: raw(x, '"a": ' + "[" * 100_000 + "]" * 100_000), "nested too deep"),
    "deep but parsed": (lambda x: raw(x, '"a": ' + '{"a": ' * 200 + "1" + "}" * 200), "nested deeper"),
    "10**7 layers in our form": (
        lambda x: own_of(x, num_hidden_layers=10**7),
        "num_hidden_layers: expected at most 64",
    ),
    "64 GiB in a hole": (lambda x: claim(x, [2**17, 2**17]), "expected at most"),
    "64 GiB as one row": (lambda x: claim(x, [1, 2**34]), "expected at most"),
    "a long generation": (
        written(GENERATION, "{" + " " * 2**20 + "}"),
        "generation_config.json: expected at most",
    ),
    "no generation": (written(GENERATION, '{"max_length": NaN}'), "generation_config.json: expected JSON"),
}
FIELDS = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads|ZeroDivisionError"),
    "a size that is a word": ({"hidden_size": "wide"}, "hidden_size"),
    "a size that is a list": ({"hidden_size": [32]}, "hidden_size"),
    "no type": ({"model_type": None}, "model_type"),
    "a type that is none": ({"model_type": ["llama"]}, "transformers cannot read it"),
    "an unknown type": ({"model_type": "nobody"}, "nobody"),
    "a rope that is none": ({"rope_parameters": {"rope_type": "nothing"}}, "nothing"),
    "an activation that is none": ({"hidden_act": "nothing"}, "nothing"),
    "architectures of numbers": ({"architectures": [7]}, "transformers"),
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "transformers cannot build a model from it",
    ),
    "a dtype that is none": ({"dtype": "float99"}, "float99"),
    "a dtype of integers": ({"dtype": "int32"}, "dtype: expected a floating dtype"),
    "10**7 layers": ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected at most 64"),
    "10**30 labels": ({"num_labels": 10**30}, "num_labels: expected at most 4096"),
    "a vocabulary of 2**40": ({"vocab_size": 2**40}, "vocab_size: expected at most"),
    "heads of 2**40": ({"head_dim": 2**40}, "head_dim: expected at most"),
    "wider than the folder": ({"intermediate_size": 2**19}, "expected a model with the"),
    "an epsilon below 0": ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected a number of at least 0, got -1.0"),
    "a flag that is a word": (
        {"output_hidden_states": "x"},
        "output_hidden_states: expected true or false, got x",
    ),
    "a flag that is a number": ({"return_dict": 3}, "return_dict: expected true or false, got 3"),
    "packed": ({"quantization_config": {"quant_method": "gptq"}}, "packed by 'gptq'"),
    "another config": (
        {"configuration_files": ["config.4.0.0.json"]},
        "configuration_files: expected no other",
    ),
    "attention of the Hub": (
        {"attn_implementation": "kernels/x"},
        "attn_implementation: expected no repository on the Hub",
    ),
    "attention of the Hub inside": (
        {"text_config": {"_attn_implementation": {"": "a/b"}}},
        "expected no repository on the Hub",
    ),
}
HOSTILE |= {
    name: (lambda folder, fields=fields: change(folder, **fields), rf"config\.json: .*({match})")
    for name, (fields, match) in FIELDS.items()
}


def raw_field(folder: Path, name: str, value: str) -> None:
    change(folder, **{name: None})
    raw(folder, f'"{name}": {value}')


def twice(folder: Path) -> None:
    """A header in which a tensor stands twice."""
    entry = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = b"{" + entry + b"," + entry + b"}"
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


class Bounded:
    """Fails what takes more than a second or 256 MiB more than the process has, or opens a pickle, or the
    network.
    """

    def __init__(self, monkeypatch):
        def forbidden(*args, **kwargs):
            raise AssertionError("opened")

        for place in ("torch.load", "pickle.load", "pickle.loads", "huggingface_hub.hf_hub_download"):
            monkeypatch.setattr(place, forbidden)

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, self.limits[1]))
        signal.signal(signal.SIGALRM, self.late)
        signal.setitimer(signal.ITIMER_REAL, 5)  # a second on a quiet machine

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self.limits)

    @staticmethod
    def late(*args):
        raise TimeoutError("not within a second")


@pytest.fixture
def bounded(monkeypatch):
    return Bounded(monkeypatch)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_by_name(folder, bounded, name):
    """Within a second, without memory, and without opening what it points at."""
    attack, match = HOSTILE[name]
    attack(folder)
    names = sorted(folder.parent.rglob("*"))
    with bounded, pytest.raises(CheckpointError, match=match):
        attnlib.load_pretrained(folder)
    assert sorted(folder.parent.rglob("*")) == names


WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([2**31, 10**7, 2**62, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "factor", "x"]), st.integers(0, 3), max_size=2
    ),
)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_config_of_anything_is_loaded_or_refused(stock, tmp_path_factory, data):
    """A model or an error of ours, whatever some fields say."""
    folder = tmp_path_factory.mktemp("any") / "folder"
    shutil.copytree(stock, folder)
    said = json.loads((folder / CONFIG).read_text())
    names = data.draw(st.lists(st.sampled_from(sorted(said)), min_size=1, max_size=2, unique=True))
    own_form = data.draw(st.booleans())
    changed = said | {name: data.draw(WORDS) for name in names}
    (folder / CONFIG).write_text(json.dumps(changed))
    if own_form:
        own(folder)
    try:
        attnlib.load_pretrained(folder)
    except (CheckpointError, NotImplementedError):
        pass
    finally:
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("form", ["one file", "shards"])
@pytest.mark.parametrize("kind", ["stock", "own"])
def test_a_folder_says_what_it_said(stock, folder, form, kind):
    if kind == "own":
        own(folder)
    if form == "shards":
        shard(folder)
    model = attnlib.load_pretrained(folder)
    torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(stock)))
    assert model.name_or_path == model.config.name_or_path == str(folder)
    assert model.generation_config.to_dict() == GenerationConfig.from_pretrained(stock).to_dict()
    assert not model.training


@pytest.mark.parametrize("kind", ["experts", "tied", "fused"])
def test_weights_that_transformers_rearranges_are_loaded(tmp_path, kind):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    config = {
        "experts": lambda: MixtralConfig(
            **sizes, num_key_value_heads=2, intermediate_size=48, num_local_experts=4
        ),
        "tied": lambda: LlamaConfig(**sizes, intermediate_size=48, tie_word_embeddings=True),
        "fused": lambda: GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        ),
    }[kind]()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(attnlib.load_pretrained(tmp_path)), logits(theirs), rtol=1e-4, atol=1e-5
    )


def test_a_model_is_its_own_and_not_its_files(folder):
    """Files that change later change nothing."""
    model = attnlib.load_pretrained(folder)
    expected = logits(model)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert logits(model).equal(expected)


def cached(folder: Path) -> Path:
    """A model in a download cache: its snapshot, which is links to blobs."""
    blobs = folder.parent / "hub" / "models--me--mine" / "blobs"
    snapshot = blobs.parent / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs.parent / "refs").mkdir()
    (blobs.parent / "refs" / "main").write_text(snapshot.name)
    for n, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{n:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{n:064x}")
    return snapshot


def test_a_snapshot_of_a_download_cache_is_loaded_by_its_path(stock, folder):
    shard(folder)
    snapshot = cached(folder)
    torch.testing.assert_close(
        logits(attnlib.load_pretrained(snapshot)), logits(AutoModelForCausalLM.from_pretrained(stock))
    )
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: expected a plain file, got a link; for a download cache use .* follow_links",
    ):
        attnlib.load_pretrained(snapshot, follow_links=False)
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(stock / CONFIG)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a link to ../../blobs"):
        attnlib.load_pretrained(snapshot)


def test_a_model_in_the_download_cache_is_loaded_by_its_name(stock, folder, monkeypatch):
    hub = cached(folder).parents[2]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(folder)
    torch.testing.assert_close(
        logits(attnlib.load_pretrained("me/mine")), logits(AutoModelForCausalLM.from_pretrained(stock))
    )
    for name in ("me/nobodys", "no where", "../nowhere"):
        with pytest.raises(CheckpointError, match="expected a folder with a checkpoint, or a Hub model"):
            attnlib.load_pretrained(name)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("said", [None, "float16"])
@pytest.mark.parametrize("asked", [None, torch.float32], ids=str)
def test_the_dtype_is_asked_for_or_said_or_stored(folder, stored, said, asked):
    reweigh(folder, lambda weights: {name: x.to(stored) for name, x in weights.items()})
    change(folder, dtype=said)
    found = stored if stored.itemsize > 1 else torch.bfloat16
    model = attnlib.load_pretrained(folder, dtype=asked)
    assert model.dtype == asked or (asked is None and model.dtype == (torch.float16 if said else found))


def test_weights_that_are_not_finite_are_taken_where_that_is_asked_for(folder):
    filled(torch.inf, 1)(folder)
    assert (
        attnlib.load_pretrained(folder, allow_nonfinite=True)
        .get_parameter(KEY.replace("k_proj", "layer.k_proj"))
        .isinf()
        .any()
    )


def test_weights_beyond_the_dtype_are_refused(folder):
    reweigh(folder, lambda weights: {KEY: weights[KEY].bfloat16().fill_(1e30)})
    assert attnlib.load_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(
        CheckpointError, match=r"k_proj.* expected weights within torch.float16, got larger ones"
    ):
        attnlib.load_pretrained(folder, dtype=torch.float16)
    assert attnlib.load_pretrained(folder, dtype=torch.float16, allow_nonfinite=True).dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"dtype": "bfloat16"},
            TypeError,
            "dtype: expected a floating .*got 'bfloat16'; pass dtype=torch.bfloat16",
        ),
        (
            {"dtype": torch.int8},
            TypeError,
            "dtype: expected a floating dtype such as torch.bfloat16, got torch.int8",
        ),
        ({"device": "nope"}, ValueError, "device: expected one that torch has here, got 'nope'"),
    ],
)
def test_arguments_are_refused_before_the_folder(options, error, why):
    with pytest.raises(error, match=f"^{why}"):
        attnlib.load_pretrained("nowhere", **options)


@pytest.mark.parametrize("kind", ["linear_attention", "sliding_attention"])
def test_layers_of_another_family_are_refused(folder, kind):
    """transformers reads these of any model, and fails in its forward."""
    change(folder, layer_types=[kind] * LAYERS)
    with pytest.raises(
        NotImplementedError, match=f"layer_types: expected full attention of llama, got '{kind}'"
    ):
        attnlib.load_pretrained(folder)


def test_what_a_folder_says_of_results_is_left_to_callers(folder):
    change(folder, return_dict=False)
    assert attnlib.load_pretrained(folder).config.return_dict


def test_an_index_of_many_names_is_read_at_once():
    """Checking as many names by pathlib took 2.6 s on the host where this was written, and 0.2 s without
    it.
    """
    weight_map = {f"model.layers.{n}.weight": f"model-{n % 1000:05}.safetensors" for n in range(300_000)}
    begin = time.process_time()
    assert len(_weight_map({"weight_map": weight_map})) == 300_000
    assert time.process_time() - begin < 1.5


def test_integers_that_no_model_has_are_passed_over(stock, folder):
    """Older files have positions and masks beside the weights."""
    reweigh(
        folder,
        lambda weights: {
            "model.position_ids": torch.arange(64),
            "model.layers.0.self_attn.bias": torch.ones(3),
        },
    )
    torch.testing.assert_close(
        logits(attnlib.load_pretrained(folder)), logits(AutoModelForCausalLM.from_pretrained(stock))
    )


def test_what_a_folder_says_of_attention_is_left_to_attnlib(folder):
    change(folder, attn_implementation="flash_attention_2", auto_map={"AutoConfig": "x.Y"})
    assert attnlib.load_pretrained(folder).config._attn_implementation == "attnlib"


def test_a_device_is_loaded_to(folder):
    assert logits(attnlib.load_pretrained(folder, device="cpu")).equal(
        logits(attnlib.load_pretrained(folder))
    )


def test_a_file_that_changes_while_it_is_read(folder, monkeypatch):
    honest = checkpoint_files.StoredTensor.load

    def changed(stored):
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
        return honest(stored)

    monkeypatch.setattr(checkpoint_files.StoredTensor, "load", changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while in use"):
        attnlib.load_pretrained(folder)


def test_the_reader_is_where_it_was():
    from attnlib.convert.checkpoint.folder import read_folder

    from attnlib.convert.checkpoint import folder, header, plain_json

    assert read_folder is checkpoint_files.read_folder
    assert folder is sys.modules["attnlib.checkpoint_files.folder"]
    assert header is sys.modules["attnlib.checkpoint_files.header"]
    assert plain_json is sys.modules["attnlib.checkpoint_files.plain_json"]


@pytest.mark.parametrize(
    "name", ["a shard above", "linked weights", "nan", "a pickle in the index", "a layer too many"]
)
def test_who_trains_a_folder_reads_it_so_too(folder, bounded, name):
    attack, match = HOSTILE[name]
    attack(folder)
    with (
        bounded,
        pytest.raises(CheckpointError, match=match.replace(" .* got another link", ".* got a link")),
    ):
        folders.load(folder, torch.float32)
