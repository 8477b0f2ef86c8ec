"""Every family of the table against transformers: what its attention computes, and folders that come out of
it.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from family_models import (
    ALL,
    ALL_RECENT,
    DECODERS,
    GROUPS,
    HEADS,
    KV_HEADS,
    MADE_OF_HEADS,
    RECENT,
    SEES,
    STREAMED,
    computed,
    equalise,
    is_as_exact,
    load,
    make,
    says,
    slow,
)
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from attnlib import CAUSAL, FULL, Gate, GroupedQueryAttention
from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert import Calibration
from attnlib.convert.check.stock_check import StockCheck
from attnlib.convert.checkpoint import CheckpointError, RequestError, convert, identity, names
from attnlib.convert.checkpoint.model import has_key_norms, read_model
from attnlib.convert.checkpoint.names import split
from attnlib.convert.checkpoint.source_rope import rope_of
from attnlib.convert.heads.converter import grouped
from attnlib.convert.text.layerwise import TextCalibration
from attnlib.integrations.transformers.families import FAMILIES
from attnlib.models.families import STORED, DefaultSizes

EVERY = (*ALL, *ALL_RECENT)
NORMED = ("hy_v3", "hunyuan_v1_dense", "minimax_m2", "phi")
FEWER = [kind for kind in EVERY if kind not in MADE_OF_HEADS]
FEW = [kind for kind in ALL if kind in FEWER]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each kind of model, and what its attention layers compute; made when first asked for."""

    @cache
    def made(kind: str):
        folder, model = tmp_path_factory.mktemp(kind) / "in", make(kind)
        model.save_pretrained(folder)
        return folder, computed(model)

    return made


def differs(folder: Path, seen: list, *, silent: bool = False) -> float:
    """The largest relative difference of what our layers with the folder's weights and ropes compute from
    ``seen``.
    """
    model = read_model(read_folder(folder))
    config = {key: x for key, x in model.config.items() if not (silent and key == "rope_parameters")}
    assert len(model.layers) == len(seen)
    worst = 0.0
    for (index, layer), (x, expected, gains) in zip(model.layers.items(), seen, strict=True):
        shape = model.shape
        stored = {name: model.checkpoint.tensors[layer.prefix + name].load() for name in layer.stored}
        weights = split(model.family, stored, shape)
        found = {name: weights.pop(name) for name in [*weights] if "norm" in name}
        assert found.keys() == gains.keys()
        assert all(found[name].equal(x) for name, x in gains.items())
        ours = GroupedQueryAttention(
            shape.width,
            shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            mask=FULL if config["model_type"] == "bert" else CAUSAL,
            rope=rope_of(config, index),
            bias="k_proj.bias" in weights,
            output_bias="o_proj.bias" in weights,
            gate=Gate("channel") if "g_proj.weight" in weights else None,
        )
        ours.load_state_dict(weights)
        with torch.no_grad():
            worst = max(worst, float((ours(x) - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("kind", EVERY)
def test_names_and_ropes_are_those_of_what_is_computed(folders, kind):
    folder, seen = folders(kind)
    assert differs(folder, seen) < 1e-5
    has_norms = any("k_norm.weight" in gains for *_, gains in seen)
    assert has_key_norms(read_model(read_folder(folder))) == has_norms
    assert differs(folder, seen, silent=True) < 1e-5  # of the rope, whose parameters are the family's own


def test_every_family_of_the_table_is_here():
    texts = {options["text_config"].get("model_type") for options in SEES.values()}
    read = {names.SEEING[kind] for kind in SEES}
    assert {*DECODERS, *RECENT, "bert"} | {text for text in read if text.endswith("_text")} == {*STORED}
    assert {*SEES} == {*names.SEEING}
    assert texts == {None, "qwen2"}


@pytest.mark.parametrize("kind", [*ALL, *slow(*ALL_RECENT)])
def test_the_identity_changes_no_byte(folders, kind, tmp_path):
    folder, _ = folders(kind)
    convert(folder, tmp_path / "out", identity, progress=False)
    before, after = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(
        x.dtype == after[name].dtype and x.numpy().tobytes() == after[name].numpy().tobytes()
        for name, x in before.items()
    )
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (tmp_path / "out/config.json").read_text()
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", FEWER)
def test_equal_heads_become_one_and_say_the_same(kind, dtype, tmp_path):
    model = make(kind).to(dtype)
    equalise(model)
    model.save_pretrained(tmp_path / "in")
    source = read_model(read_folder(tmp_path / "in"))
    converter = grouped(source.checkpoint.config, GROUPS, merge="mean")
    report = convert(tmp_path / "in", tmp_path / "out", converter, progress=False)
    assert (
        report["cache_bytes_per_token"]["after"] * KV_HEADS
        == report["cache_bytes_per_token"]["before"] * GROUPS
    )
    changes = report["config_changes"]
    assert (changes["text_config"] if kind in SEES else changes)["num_key_value_heads"] == GROUPS
    assert len(str(changes)) < 80
    result = load(tmp_path / "out")
    assert result.config.get_text_config().num_key_value_heads == GROUPS
    assert is_as_exact(tmp_path / "in", result)
    text = {"text_config"} if kind in SEES else {"num_key_value_heads", "head_dim"}
    before, after = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("in", "out"))
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} <= text


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "olmo3", "cohere", "afmoe", "qwen3_next", *slow(*NORMED)])
def test_norms_move_with_their_heads(kind, tmp_path):
    """Equal heads that are not neighbours find each other, with the gains of their own and of their
    queries.
    """
    model = make(kind)
    equalise(model, neighbours=False)
    model.save_pretrained(tmp_path / "in")
    config = read_model(read_folder(tmp_path / "in")).config
    for grouping in ("neighbours", "similar"):
        converter = grouped(config, GROUPS, merge="mean", grouping=grouping)
        convert(tmp_path / "in", tmp_path / grouping, converter, progress=False)
    expected = says(model)
    torch.testing.assert_close(says(load(tmp_path / "similar")), expected, rtol=1e-5, atol=1e-5)
    assert (says(load(tmp_path / "neighbours")) - expected).abs().max() > 1e-2
    for options in ({"merge": "mean", "align": "all"}, {"merge": "principal"}):
        with pytest.raises(RequestError, match=r"weights that differ|norms of q and k|output gate"):
            convert(tmp_path / "in", tmp_path / "refused", grouped(config, GROUPS, **options), progress=False)


@pytest.mark.parametrize("kind", [*FEW, *slow(*(kind for kind in STREAMED if kind in FEWER))])
def test_calibrations_over_text_are_of_what_the_layers_read(kind, tmp_path):
    model, tokens, read = make(kind), torch.arange(3, 25).view(2, 11), []
    model.save_pretrained(tmp_path)
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "qkv_proj")) and "vis" not in name:
            module.register_forward_hook(lambda module, args, out: read.append(args[0].clone()))
    with torch.no_grad():
        model(tokens)
    source = read_model(read_folder(tmp_path))
    calibrations = TextCalibration(source, tokens)
    for index, x in zip(source.layers, read, strict=True):
        expected = Calibration.of([x]).moment
        assert (calibrations(index).moment - expected).norm() < 1e-5 * expected.norm()


def text_of(kind: str) -> tuple[str, dict]:
    """The table's entry that a kind of model reads text by, and what its config says beside the sizes."""
    if kind not in SEES:
        return kind, (DECODERS | RECENT).get(kind, {})
    options = SEES[kind]["text_config"]
    return options.get("model_type", names.SEEING[kind]), options


def changes(kind: str):
    """The table's entry for this kind of model, one field of it changed at a time."""
    text, options = text_of(kind)
    entry = STORED[text]
    for i in range(len(entry.weights) - 1):
        (one, ours), (other, others) = entry.weights[i : i + 2]
        if len(ours) == len(others) == 1:
            swapped = (*entry.weights[:i], (one, others), (other, ours), *entry.weights[i + 2 :])
            yield "weights", replace(entry, weights=swapped)
        elif len(ours) > 1:
            moved = (*ours[:-2], ours[-1], ours[-2])
            yield "weights", replace(entry, weights=((one, moved), *entry.weights[1:]))
    others = {"path": f"x{entry.path}", "stem": r"x\.", "is_transposed": not entry.is_transposed}
    others |= dict.fromkeys(("width", "heads"), "nowhere")
    others |= {"is_hybrid": False} if entry.is_hybrid else {"layers": "nowhere"}
    others["rope"] = {"half": "interleaved", "interleaved": "half", None: "half"}[entry.rope]
    if any(len(ours) > 1 for _, ours in entry.weights):
        others["is_by_head"] = not entry.is_by_head
    if options.get("head_dim", 8) != 8:  # the width over heads
        others["head_dim"] = None
    if entry.rope is not None:
        others["share"] = 1.0 if entry.share < 1 else 0.5
        others |= {} if "rope_theta" in dict(entry.scaled) else {"theta": 50.0}
    if entry.rope_layers is not None:
        others["rope_layers"] = "layer_types" if entry.rope_layers == "position_embedding_type" else None
    if entry.window_theta is not None:
        others["window_theta"] = 50.0
    if entry.scaled:
        others["scaled"] = ()
    if len(entry.weights) > 4:
        others["gains"] = "shared" if entry.gains != "shared" else "joined"
    for name, value in others.items():
        yield name, replace(entry, **{name: value})


@pytest.mark.parametrize("kind", EVERY)
def test_every_entry_matters(folders, kind, monkeypatch):
    """A folder whose family has another entry is refused, or other attention comes out of it."""
    folder, seen = folders(kind)
    tried = set()
    for name, changed in changes(kind):
        monkeypatch.setattr(names, "STORED", {text_of(kind)[0]: changed})
        try:
            found = differs(folder, seen, silent=True)
        except (CheckpointError, RuntimeError, ValueError, AssertionError):
            found = 1.0
        assert found > 1e-4, f"{name}: {getattr(changed, name)}"
        tried.add(name)
    assert len(tried) > 6


@pytest.mark.parametrize("kind", names.SEEING)
def test_the_text_that_no_file_names_is_as_transformers_takes_it(kind):
    assert names.SEEING[kind] == CONFIG_MAPPING[kind]().text_config.model_type


@pytest.mark.parametrize("kind", STORED)
def test_what_a_file_leaves_out_is_as_transformers_takes_it(kind):
    entry, config = STORED[kind], CONFIG_MAPPING[kind]

    def default(key):
        return None if key is None else config.__dataclass_fields__[key].default if key in fields else None

    fields = config.__dataclass_fields__
    keys = (entry.width, entry.layers, entry.heads, entry.kv_heads, entry.head_dim)
    assert DefaultSizes(*(default(key) for key in keys)) == entry.sizes
    assert (entry.kv_heads is None) == ("num_key_value_heads" not in fields)
    assert (entry.refused == "clip_qkv") == ("clip_qkv" in fields)
    has_names = any("layernorm" in name for name, _ in entry.weights)
    assert (entry.refused == "qk_layernorm") == ("qk_layernorm" in fields and not has_names)


@pytest.mark.parametrize("kind", MADE_OF_HEADS)
def test_who_has_no_key_for_fewer_heads_says_so(kind):
    assert STORED[kind].kv_heads is None


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmo2", "gpt_neox", "opt", "llava", "qwen2_vl"])
@pytest.mark.parametrize("has_accelerate", [True, False])
def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(
    folders, kind, tmp_path, has_accelerate, monkeypatch
):
    folder, _ = folders(kind)
    monkeypatch.setattr(transformers.utils, "is_accelerate_available", lambda: has_accelerate)
    assert StockCheck(folder, logits=True)(folder, {})["largest_logit_difference"] == 0
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    parts = (
        "embed",
        "norm",
        "mlp",
        "k_proj",
        "experts.1.",
        "vis",
        "projector",
        "query_key_value",
        "bias",
        "fc1",
    )
    lacking = {next((name for name in tensors if part in name), None) for part in parts} - {None}
    assert len(lacking) > 3
    for name in lacking:
        save_file({other: x for other, x in tensors.items() if other != name}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="expected all") as error:
            StockCheck(tmp_path, logits=False)
        assert error.value.exit_code == 3
        assert name.rsplit(".", 2)[1] in str(error.value)


def test_experts_take_no_memory_when_names_are_checked(folders, tmp_path, monkeypatch):
    """transformers stacks them, which would make a tensor of each whole layer."""
    folder, _ = folders("qwen3_moe")
    sizes = []
    real = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda *given, **more: sizes.append((x := real(*given, **more)).device) or x
    )
    StockCheck(folder, logits=False)
    assert len(sizes) > 3
    assert {device.type for device in sizes} == {"meta"}


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [("olmo", "clip_qkv", 8.0), ("olmoe", "clip_qkv", 8.0), ("stablelm", "qk_layernorm", True)],
)
def test_options_that_nobody_converts_are_refused(folders, kind, option, value, tmp_path):
    folder, _ = folders(kind)
    read_model(read_folder(folder))
    model = make(kind)
    setattr(model.config, option, value)
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match=rf"{option}: expected null or false, got {value}"):
        read_model(read_folder(tmp_path / "in"))


@pytest.mark.parametrize("kind", ["afmoe", "qwen3_next"])
def test_values_behind_gates_are_not_rotated(folders, kind):
    config = read_model(read_folder(folders(kind)[0])).config
    for options in ({"merge": "principal-values"}, {"align": "values"}):
        with pytest.raises(RequestError, match="each of which has its own output gate"):
            grouped(config, GROUPS, **options)


def test_norms_that_subtract_a_mean_do_not_move_with_rotations(tmp_path):
    """Their weights may be equal, as in a new model; the mean that they subtract is another one."""
    model = make("phi")
    for name, x in model.named_parameters():
        if "layernorm.weight" in name:
            torch.nn.init.ones_(x)
    model.save_pretrained(tmp_path / "in")
    config = read_model(read_folder(tmp_path / "in")).config
    convert(tmp_path / "in", tmp_path / "values", grouped(config, GROUPS, align="values"), progress=False)
    with pytest.raises(RequestError, match="norms of q and k with biases, which subtract a mean"):
        convert(tmp_path / "in", tmp_path / "all", grouped(config, GROUPS, align="all"), progress=False)


def test_layers_that_only_predict_further_tokens_are_copied(folders, tmp_path):
    """GLM 4.5 has one behind its last layer."""
    folder, _ = folders("glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    further = {
        name.replace(".1.", ".2."): x.clone() for name, x in tensors.items() if "layers.1.self" in name
    }
    (tmp_path / "in").mkdir()
    save_file(tensors | further, tmp_path / "in/model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for predicting in (0, 1):
        fields = config | {"num_nextn_predict_layers": predicting}
        (tmp_path / "in/config.json").write_text(json.dumps(fields))
        if not predicting:
            with pytest.raises(CheckpointError, match="num_hidden_layers: expected 3 as stored, got 2"):
                read_model(read_folder(tmp_path / "in"))
    report = convert(tmp_path / "in", tmp_path / "out", grouped(config, GROUPS), progress=False)
    after = load_file(tmp_path / "out/model.safetensors")
    assert {*further} <= {*report["attention_tensors_copied_as_they_are"]}
    assert all(after[name].equal(x) for name, x in further.items())
    assert len(after["model.layers.1.self_attn.k_proj.weight"]) == GROUPS * 8


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_a_layer_behind_the_last_is_no_hybrid(folders, kind, tmp_path):
    folder, _ = folders(kind)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_hidden_layers: expected"):
        read_model(read_folder(tmp_path))


@pytest.mark.parametrize(("kind", "part"), FAMILIES)
def test_the_layers_room_has_the_same_names(kind, part):
    """One table says both how a family is stored and where its layers are."""
    if part == "self" and kind in STORED:
        theirs, ours = FAMILIES[kind, part], STORED[kind]
        for field in type(ours).__dataclass_fields__:
            assert getattr(theirs, field) == getattr(ours, field), field


def test_heads_side_by_side_are_fused_by_head():
    """Rows of GPT-NeoX are one head's query, key and value after another's."""
    family, shape = STORED["gpt_neox"], names.LayerShape(0, 8, HEADS, HEADS, 2)
    rows = torch.arange(3 * 8.0)[:, None].expand(24, 8)
    weights = split(family, {"query_key_value.weight": rows}, shape)
    assert weights["q_proj.weight"][:, 0].tolist() == [0, 1, 6, 7, 12, 13, 18, 19]
    assert weights["v_proj.weight"][:, 0].tolist() == [4, 5, 10, 11, 16, 17, 22, 23]
    assert names.join(family, weights, shape)["query_key_value.weight"].equal(rows)
    with pytest.raises(CheckpointError, match=r"as many KV heads as query heads"):
        names.join(
            family, weights | {"k_proj.weight": torch.ones(2, 8), "v_proj.weight": torch.ones(2, 8)}, shape
        )
