"""Families whose attention has an output gate, or a rope of several axes, also with images."""

import copy

import pytest
import torch
from families import RECENT, SEEING, SIZES, TOKENS, small
from transformers import CONFIG_MAPPING

from attnlib import CAUSAL, FULL, Axes, Gate, GroupedQueryAttention, Rope
from attnlib.convert.checkpoint.errors import CheckpointError
from attnlib.convert.checkpoint.names import family_of
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.families import FAMILIES
from attnlib.integrations.transformers.own import latent_from, put_layers
from attnlib.integrations.transformers.replacing import ReplacedPackedAttention
from attnlib.models.own_form import GroupedForm, LatentForm
from tests.integrations import test_transformers as all_modes
from tests.integrations.test_transformers import agree, both, gradients, tokens

AXIAL = [family for family in RECENT if FAMILIES[family, "self"].axes is not None]
OURS = [*AXIAL, *(x for x in RECENT if FAMILIES[x, "self"].gate is not None and x not in AXIAL)]


@pytest.mark.parametrize("family", OURS)
def test_logits_and_gradients(family):
    all_modes.test_logits_and_gradients(both(family, "layers"))


@pytest.mark.parametrize("family", OURS)
def test_generated_tokens(family):
    all_modes.test_generated_tokens(both(family, "layers"), "dynamic")


@pytest.mark.parametrize("family", AXIAL)
@torch.no_grad()
def test_each_axis_matters(family):
    """Positions on each axis count, those of the text model's rope and no others."""
    pair = both(family, "layers")
    bodies = [getattr(model.model, "language_model", model.model) for model in pair]
    ids, positions = tokens(pair[0]), torch.randint(0, 9, (3, 2, 23)).cumsum(-1)
    found = []
    for axis in (None, 0, 1, 2):
        moved = positions.clone()
        if axis is not None:
            moved[axis] += torch.arange(23)
        theirs, mine = (body(ids, position_ids=moved).last_hidden_state for body in bodies)
        agree(mine, theirs)
        found.append(mine)
    for other in found[1:]:
        assert (other - found[0]).abs().max() > 1e-3


def shown(model, *, rows: int = 2) -> dict:
    """Inputs of a model: text and an image of 2 x 4 tokens in each row, and another image in the first."""
    grids = [(1, 4, 8)] * rows + [(1, 4, 4)]
    eyes = model.config.vision_config
    ids = torch.randint(3, 50, (rows, 23))
    starts = [(row, 3 + 2 * row, 8) for row in range(rows)] + [(0, 15, 4)]
    types = torch.zeros_like(ids)
    for row, start, size in starts:
        ids[row, start - 1], ids[row, start + size] = TOKENS["vision_start_token_id"], 57
        ids[row, start : start + size] = TOKENS["image_token_id"]
        types[row, start : start + size] = 1
    grids = [grids[0], grids[-1], *grids[1:-1]]  # in the order of their tokens
    depth = 1 if model.config.model_type.startswith("ernie") else eyes.temporal_patch_size
    channels = eyes.in_channels * depth * eyes.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(sum(t * h * w for t, h, w in grids), channels),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": types,
    }


@pytest.mark.parametrize("family", [x for x in AXIAL if x in SEEING])
def test_text_and_images(family):
    """Logits and the gradients of both stacks err no more than theirs; tokens go on from an image's."""
    eager, ours = both(family, "layers")
    exact = copy.deepcopy(eager).double()
    exact.set_experts_implementation("eager")  # others multiply in fp32 at most
    assert sum(isinstance(x, ReplacedPackedAttention) for x in ours.modules()) == 2
    given = shown(eager)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "num_beams": 2}
    theirs, mine = (model.generate(**given, **options) for model in (eager, ours))
    assert torch.equal(mine, theirs)
    logits = [model(**given).logits for model in (eager, ours)]
    logits.append(exact(**given | {"pixel_values": given["pixel_values"].double()}).logits)
    weights = torch.randn_like(logits[0])
    for x in logits:
        (x * weights).sum().backward()
    theirs, mine, right = (distances(x, logits[2]) for x in logits)
    assert mine <= 2 * theirs
    assert right == 0
    theirs, mine, right = (gradients(model) for model in (eager, ours, exact))
    assert mine.keys() == right.keys()
    for name, x in right.items():
        if not x.is_floating_point():  # the hashes of n-grams
            continue
        noise = 1e-6 * x.norm() + 1e-7
        assert distances(mine[name], x) <= 3 * distances(theirs[name], x) + noise, name


@pytest.mark.parametrize("family", [x for x in AXIAL if "layer_types" not in RECENT[x]])
@torch.no_grad()
def test_packed_positions_of_text_beside_those_of_axes(family):
    """Positions of text, which come first, tell sequences of a row apart."""
    pair = both(family, "layers")
    ids, lengths = tokens(pair[0]), ((5, 7, 11), (20, 3))
    text = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions = torch.cat((text[None], text + torch.randint(0, 9, (3, 2, 23))))
    bodies = [model.model.language_model for model in pair]
    theirs, mine = (body(ids, position_ids=positions, use_cache=False).last_hidden_state for body in bodies)
    agree(mine, theirs)
    alone = bodies[1](ids[:, 5:12], position_ids=positions[1:, :, 5:12]).last_hidden_state
    agree(mine[:1, 5:12], alone[:1])


@torch.no_grad()
def test_images_in_pages():
    eager, ours = both("qwen2_5_vl_text", "layers")
    given, options = shown(eager), {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1}
    cache = hf.PagedCache(ours, pages=96, page_size=4, max_sequences=4)
    assert torch.equal(
        ours.generate(**given, **options, **cache.as_argument), eager.generate(**given, **options)
    )


def distances(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.detach().double() - exact.detach()).norm())


@torch.no_grad()
def test_own_layers_beside_a_vision_encoder():
    """Those that a config.json describes take the places of the text model's only."""
    torch.manual_seed(0)
    eager = small("qwen2_5_vl_text").eval()
    ours = copy.deepcopy(eager)
    put_layers(ours, [GroupedForm(num_key_value_heads=2)] * 2)
    for theirs, mine in zip(eager.model.language_model.layers, ours.model.language_model.layers, strict=True):
        mine.self_attn.layer.load_state_dict(theirs.self_attn.state_dict())
    for model, name in ((eager, "eager"), (ours, "attnlib")):
        model.set_attn_implementation(name)
    given = shown(eager)
    agree(ours(**given).logits, eager(**given).logits)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen2_5_vl_text", "qwen2_5_vl_text: expected a rope with one axis .* got 3"),
        ("afmoe", "latent layers do not support q_norm, got latents"),
    ],
)
def test_latents_of_their_own_are_refused(family, message):
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    form = LatentForm(**sizes, rope_pairs=(0, 1), norm_eps=1e-6)
    with pytest.raises(NotImplementedError, match=message):
        put_layers(small(family), [form] * 2)


def test_gates_over_latents_of_their_own_are_refused():
    gated = GroupedQueryAttention(32, 4, mask=CAUSAL, gate=Gate("head"), device="meta")
    form = LatentForm(
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=0, v_head_dim=8, rope_pairs=(), norm_eps=1e-6
    )
    with pytest.raises(NotImplementedError, match="latent layers do not support gate"):
        latent_from(gated, form)


@torch.no_grad()
def test_beams_of_a_hybrid():
    """They reorder keys, and the states of linear attention; a state cannot take tokens back."""
    eager, ours = both("qwen3_next", "layers")
    ids, options = tokens(eager, 2, 9), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    theirs, mine = (model.generate(ids, num_beams=3, **options) for model in (eager, ours))
    assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        ours.generate(ids[:1], assistant_model=copy.deepcopy(ours), **options)
    with pytest.raises(NotImplementedError, match=r"layer_types: expected .* got 'linear_attention'"):
        hf.from_config(eager.config, 0)


# Single layers


@pytest.mark.parametrize(
    ("family", "index", "heads", "gate"),
    [
        ("qwen3_next", 1, 4, Gate("channel", bias=True)),
        ("afmoe", 0, 4, Gate("channel")),
        ("laguna", 0, 6, Gate("head", "softplus")),
        ("laguna", 1, 4, Gate("head", "softplus")),
        ("step3p5", 0, 6, Gate("head")),
        ("step3p5", 1, 4, Gate("head")),
    ],
)
def test_gates_and_heads_are_the_layers(family, index, heads, gate):
    layer = hf.from_config(config_of(family, attention_bias=True), index, device="meta")
    assert (layer.num_heads, layer.gate) == (heads, gate)


@pytest.mark.parametrize("family", [x for x in OURS if FAMILIES[x, "self"].select is None])
@torch.no_grad()
def test_a_layer_by_itself(family):
    """With a module's weights, it returns what the module does, at positions unlike those of text."""
    torch.manual_seed(0)
    model = small(family).eval()
    model.set_attn_implementation("eager")
    body, config = getattr(model.model, "language_model", model.model), model.config.get_text_config()
    module, x = body.layers[1].self_attn, torch.randn(2, 9, config.hidden_size)
    layer = hf.from_config(config, 1, weights=module.state_dict())
    positions = torch.randint(1, 99, (3, 2, 9) if family in AXIAL else (2, 9))
    by_type = ("full_attention",) if family in ("laguna", "step3p5") else ()
    angles = body.rotary_emb(x, positions, *by_type)
    hidden = torch.full((1, 1, 9, 9), torch.finfo(x.dtype).min).triu(1)
    theirs = module(x, position_embeddings=angles, attention_mask=hidden)[0]
    agree(layer(x, positions=positions if layer.rope is not None else None), theirs)


def test_gates_of_channels():
    """Laguna's other gate, in logits as in each layer."""
    layer = hf.from_config(config_of("laguna", gating="per-channel"), device="meta")
    assert layer.gate == Gate("channel", "softplus")


@pytest.mark.parametrize(
    ("family", "dim", "share", "axes"),
    [
        ("qwen2_vl_text", 128, None, Axes((16, 24, 24), "blocks")),
        ("qwen3_vl_text", 128, None, Axes((24, 20, 20), "interleaved")),
        ("qwen3_5_text", 256, 0.25, Axes((11, 11, 10), "interleaved")),
        ("glm4v_text", 128, 0.5, Axes((8, 12, 12), "blocks")),
        ("ernie4_5_vl_moe_text", 128, None, Axes((20, 22, 22), "alternating")),
    ],
)
def test_sections_are_the_familys_unless_a_config_says(family, dim, share, axes):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {} if share is None else {"partial_rotary_factor": share}
    fields = {"hidden_size": 4 * dim, "rope_parameters": rope}
    fields |= {"head_dim": dim} if "head_dim" in RECENT[family] else {}
    assert hf.from_config(config_of(family, **fields), 1, device="meta").rope.axes == axes


def config_of(family: str, **fields):
    return CONFIG_MAPPING[family](**SIZES | RECENT[family] | fields)


@torch.no_grad()
def test_a_layer_of_a_vision_encoder():
    """It has the angles of rows and columns, and sees one image."""
    layer = hf.from_config(CONFIG_MAPPING["qwen3_vl_vision"](hidden_size=32, num_heads=2))
    assert layer.mask == FULL
    assert layer.rope == Rope(16, axes=Axes((4, 4), "ladders"))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("axk2", "axk2: its output gate is computed from latents"),
        ("hy_v4", "hy_v4: it has sinks over latents, and an indexer"),
        ("hunyuan_vl_text", "hunyuan_vl_text: it rotates the two channels of a pair by different angles"),
    ],
)
def test_families_that_differ_are_refused_by_name(family, message):
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(CONFIG_MAPPING[family]())


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("step3p5", {"gating": "per-channel"}, "gating: expected True, got 'per-channel'"),
        ("step3p5", {"per_layer_config": {0: {"skip": ["mlp"]}}}, r"skip: expected \(\), got \['mlp'\]"),
        (
            "step3p5",
            {"per_layer_config": {0: {"sink_size": 4}, 1: {"sink_size": 4}}},
            "sink_size=4 is unknown for step3p5",
        ),
        ("glm4v_text", {"head_dim": 16}, "head_dim=16 is unknown for glm4v_text"),
        ("ernie4_5_vl_moe_text", {"attention_dropout": 0.1}, "attention_dropout=0.1 is unknown"),
        (
            "qwen3_vl_text",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": False}},
            "mrope_interleaved: expected True, got False",
        ),
        (
            "qwen3_vl_vision",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type: expected 'axial', got 'linear'",
        ),
    ],
)
def test_fields_that_differ_are_refused(family, fields, message):
    known = SIZES | RECENT[family] if family in RECENT else {}
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(CONFIG_MAPPING[family](**known | fields))


@pytest.mark.parametrize("family", ["laguna", "step3p5", "step3p7"])
def test_checkpoints_of_families_that_storage_does_not_describe_are_not_converted(family):
    with pytest.raises(CheckpointError, match=f"{family} cannot be converted, because the number of heads"):
        family_of(family)
