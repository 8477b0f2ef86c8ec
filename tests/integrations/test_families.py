"""The table of families: every entry decides what a model computes, and what is not known is refused."""

import copy
import dataclasses

import pytest
import torch
from families import DECODERS, RECENT, SIZES, recent, small
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from attnlib import CAUSAL, GroupedQueryAttention, Rope
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers import building, families, replacing
from attnlib.integrations.transformers.mistral_large import LearntRope
from attnlib.integrations.transformers.norms import (
    BiasedLayerNorm,
    HeadLayerNorm,
    HeadRMSNorm,
    OffsetRMSNorm,
    PlainRMSNorm,
    WideRMSNorm,
)
from tests.integrations.test_transformers import agree, both, tokens

NORMS = (
    HeadRMSNorm,
    OffsetRMSNorm,
    WideRMSNorm,
    HeadLayerNorm,
    BiasedLayerNorm,
    PlainRMSNorm,
    None,
)
# Those with gates and axes are in test_gated_and_axial_families.py.
OTHERS_OF_RECENT = [
    x for x in RECENT if (entry := families.FAMILIES[x, "self"]).gate is None and entry.axes is None
]
# Of each entry, what else it could be.
OTHERS = {
    "weights": lambda x: [swapped(x)],
    "is_mixed": lambda x: [False],
    "is_transposed": lambda x: [not x],
    "is_by_head": lambda x: [not x],
    "is_causal": lambda x: [not x],
    "bias": lambda x: [False, True, ("q_proj",)],
    "output_bias": lambda x: [False, True],
    "rope": lambda x: ["half", "interleaved", None],
    "rotates_part": lambda x: [not x],
    "rope_layers": lambda x: [None, "layer_types", "no_rope_layers"],
    "norm": lambda x: NORMS,
    "rotates": lambda x: [None, lambda *_: False],
    "options": lambda x: [None],
    "value_scale": lambda x: [None],
    "norm_eps": lambda x: [0.1],
    "norm_after_rope": lambda x: [not x],
    "window": lambda x: [None, "layer_types", "sliding_window"],
    "scale": lambda x: [lambda *_: 0.7, None],
    "softcap": lambda x: [None, "initializer_range"],
    "sinks": lambda x: [not x],
    "gate": lambda x: [None] if x is None else [None, softer(x)],
    "temperature": lambda x: [None],
    "shared": lambda x: [None],
    "value_norm": lambda x: [not x],
    "values": lambda x: [None],
}
OF_LATENTS = {"weights", "is_transposed", "is_causal", "bias", "rope", "norm_eps", "temperature"}


def swapped(names):
    """Keys in the place of values, or two projections of latents, and the other way round."""
    names = list(names)
    pairs = (("k_proj", "v_proj"), ("q_a_proj", "q_b_proj"), ("q_proj", "kv_b_proj"))
    found = ([n for n, (_, ours) in enumerate(names) if ours in ((a,), (b,))] for a, b in pairs)
    at = next((both for both in found if len(both) == 2), None)
    if at is None:  # fused
        return tuple((name, ours[::-1]) for name, ours in names)
    one, other = at
    names[one], names[other] = (names[one][0], names[other][1]), (names[other][0], names[one][1])
    return tuple(names)


def softer(gate):
    """The gate with another activation."""
    others = {"sigmoid": "softplus", "softplus": "sigmoid"}
    return lambda config: dataclasses.replace(x := gate(config), activation=others[x.activation])


def changes(family, config):
    """The family with one entry changed, wherever that says something else of this config."""
    for name, others in OTHERS.items():
        value = getattr(family, name)
        for other in others(value):
            says = [
                building._value(config, x) if name in ("bias", "output_bias") else x for x in (value, other)
            ]
            if says[0] != says[1] and is_said(name, other, family, config):
                yield name, other, dataclasses.replace(family, **{name: other})


def is_said(name, other, family, config) -> bool:
    """Whether anything depends on the entry."""
    changed = dataclasses.replace(family, **{name: other})
    if family.is_latent and name not in OF_LATENTS:
        return False
    if name == "rope" and family.rope == "rope_interleave":
        return other != "interleaved"
    if name == "sinks" and family.options is not None:  # which layers have sinks is an option
        return False
    if name == "is_causal" and config.model_type == "phimoe":  # its window comes with a mask of all pairs
        return False
    if name == "rotates":
        return family.rope is not None and rotated(family, config) != rotated(changed, config)
    if name == "is_by_head":
        return any(len(ours) > 1 for _, ours in family.weights)
    if name == "norm_eps":
        return family.norm is not None or family.is_latent
    if name == "norm_after_rope":  # norms without gains commute with a rotation
        return family.norm not in (None, PlainRMSNorm)
    if name == "rope_layers":
        if family.rope is None or family.rotates is not None:
            return False
        if other is not None and not hasattr(config, other):  # a model cannot be made
            return other != "layer_types"
        return rotated(family, config) != rotated(changed, config)
    if name == "window":
        if (
            family.norm is PlainRMSNorm
        ):  # Llama 4's chunks come with its masks: see test_chunks_are_the_layers
            return False
        if other == "sliding_window":
            return getattr(config, other, None) is not None
        return other != "layer_types" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if name == "norm" and other is PlainRMSNorm:
        return family.norm is not None
    return getattr(family, name) or name not in ("rotates_part", "temperature")


def rotated(family, config) -> list[bool]:
    """The layers that have a rope."""
    return [building._rotates(family, config, n) for n in range(config.num_hidden_layers)]


@pytest.mark.parametrize("family", OTHERS_OF_RECENT)
@torch.no_grad()
def test_a_recent_family(family):
    """Logits of attnlib's attention and layers, and one generate; test_transformers.py has slow tests."""
    eager, ours = both(family)
    ids, mask = tokens(eager), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    expected = eager(ids).logits
    agree(ours(ids).logits, expected)
    hf.replace(ours)
    agree(ours(ids).logits, expected)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    theirs, mine = (model.generate(ids[:, :12], **options, eos_token_id=60) for model in (eager, ours))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", OTHERS_OF_RECENT)
@torch.no_grad()
def test_layers_alone_compute_what_a_model_computes(family):
    """With masks and ropes of their own."""
    torch.manual_seed(0)
    model, seen = small(family).eval(), {}
    model.set_attn_implementation("eager")
    for path, module, at in list(replacing.attention_of(model)):
        config = replacing.config_of(module)
        layer = hf.from_config(config, at[1], part=at[0], weights=module.state_dict()).eval()
        if not layer.own_keys:  # see test_shared_keys.py
            continue
        needs_others = building.family_of(config, at[0]).select and not layer.select
        if needs_others or isinstance(layer.rope, LearntRope):  # see test_selecting_families.py
            continue

        def compared(module, args, kwargs, out, path=path, layer=layer):
            x = args[0] if args else kwargs["hidden_states"]
            seen[path] = out[0]
            agree(layer(x), out[0])

        module.register_forward_hook(compared, with_kwargs=True)
    model(tokens(model))
    assert seen


@pytest.mark.parametrize("family", [*DECODERS, *recent()])
@torch.no_grad()
def test_every_entry_matters(family, monkeypatch):
    """A model whose family has another entry cannot be made, or computes something else."""
    torch.manual_seed(0)
    model = small(family).eval()
    model.set_attn_implementation("eager")
    ids = tokens(model)
    expected = model(ids).logits
    error = (hf.replace(copy.deepcopy(model))(ids).logits - expected).abs().max()
    entry, tried = families.FAMILIES[family, "self"], 0
    for name, other, changed in changes(entry, model.config.get_text_config()):
        tried += 1
        with monkeypatch.context() as patch:
            for module in (building, replacing):
                patch.setattr(module, "FAMILIES", {(family, "self"): changed})
            try:
                got = hf.replace(copy.deepcopy(model))(ids).logits
            except (ValueError, RuntimeError, TypeError, NotImplementedError, AttributeError, KeyError):
                continue
        assert (got - expected).abs().max() > 100 * error + 1e-5, f"{name}={other}"
    assert tried > 5


@pytest.mark.parametrize(("family", "part"), [key for key, x in families.FAMILIES.items() if x.dropout])
def test_dropout_is_the_familys(family, part):
    entry = families.FAMILIES[family, part]
    make = DeepseekV3Config if family == "kimi_k2" else CONFIG_MAPPING[family]
    known = DECODERS | RECENT
    fields = SIZES | known[family] if family in known else {}
    config = make(**fields | {entry.dropout: 0.25})
    config.model_type = family
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    index = next(
        n for n, kind in enumerate(kinds) if kind.endswith("attention") and kind != "linear_attention"
    )
    assert hf.from_config(config, index, part=part, device="meta").dropout_p == 0.25


@pytest.mark.parametrize("family", ["gpt2", "starcoder2", "seed_oss"])
def test_dropout_after_the_layer(family):
    entry = families.FAMILIES[family, "self"]
    torch.manual_seed(0)
    model = hf.replace(small(family)).train()
    setattr(model.config, entry.residual_dropout, 0.5)
    module = next(x for x in model.modules() if isinstance(x, replacing.ReplacedAttention))
    module.layer.dropout_p = 0.0
    zeros = [
        (x == 0).float().mean()
        for x in (module(torch.randn(2, 23, 32), position_embeddings=angles(module))[0],)
    ]
    assert 0.4 < zeros[0] < 0.6


def angles(module):
    return None if module.layer.rope is None else module.layer.rope.angles(torch.arange(23))


def test_a_kimi_is_a_deepseek():
    """Whose config says the same by another name."""
    model, x, layers = small("deepseek_v3"), torch.randn(1, 9, 32), []
    config, weights = model.config, model.model.layers[0].self_attn.state_dict()
    for config.model_type in ("deepseek_v3", "kimi_k2"):
        layers.append(hf.from_config(config, weights=weights))
    assert torch.equal(*(layer(x) for layer in layers))


def test_chunks_are_the_layers():
    """Where no model hands them on."""
    config = CONFIG_MAPPING["llama4_text"](**SIZES | DECODERS["llama4_text"])
    masks = [hf.from_config(config, n, device="meta").mask for n in range(2)]
    i = torch.arange(20)
    nought = torch.tensor(0)
    shown = masks[0].visible(nought, nought, i[:, None], i, nought[None])
    assert torch.equal(shown, (i[:, None] // 8 == i // 8) & (i[:, None] >= i))
    assert masks[1] == CAUSAL


# What is refused


def llama(**fields):
    return LlamaConfig(**SIZES | fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: CONFIG_MAPPING["bloom"](),
            "config: model_type: expected a type that docs/transformers.md lists, .* got 'bloom'",
        ),
        (lambda: llama(attention_sinks=True), "config: attention_sinks=True is unknown for llama"),
        (
            lambda: CONFIG_MAPPING["mistral"](attention_bias=True),
            "attention_bias=True is unknown for mistral",
        ),
        (
            lambda: CONFIG_MAPPING["gemma2"](attention_multiplier=0.3),
            "attention_multiplier=0.3 is unknown for gemma2",
        ),
        (
            lambda: CONFIG_MAPPING["gemma2"](use_bidirectional_attention=True),
            "use_bidirectional_attention: expected F",
        ),
        (
            lambda: CONFIG_MAPPING["gpt2"](add_cross_attention=True),
            "add_cross_attention: expected False, got True",
        ),
        (lambda: CONFIG_MAPPING["bert"](is_decoder=True), "is_decoder: expected False, got True"),
        (
            lambda: llama(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "partial_rotary_factor: llama rotates whole heads, got 0.5",
        ),
        (
            lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "alpha": 2.0}),
            "rope_parameters: alpha=2.0 is unknown",
        ),
        (lambda: CONFIG_MAPPING["qwen3"](layer_types=["linear_attention"] * 32), "got 'linear_attention'"),
        (
            lambda: CONFIG_MAPPING["lfm2"](layer_types=["conv"] * 32),
            "expected full attention of lfm2, got 'conv'",
        ),
        (
            lambda: CONFIG_MAPPING["ernie4_5"](attention_dropout=0.1),
            "attention_dropout=0.1 is unknown for ernie4_5",
        ),
        (lambda: CONFIG_MAPPING["stablelm"](qk_layernorm=True), "qk_layernorm: expected False, got True"),
    ],
)
def test_what_is_not_known_is_refused(config, message):
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(config())


def test_a_part_that_a_family_has_not():
    with pytest.raises(NotImplementedError, match=r"got 't5' \(self\)"):
        hf.from_config(CONFIG_MAPPING["t5"]())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("q_proj.weight"), "q_proj.weight: expected it among the weights"),
        (
            lambda w: w.update({"q_proj.lora_A.weight": torch.ones(2, 32)}),
            "q_proj.lora_A.weight: the layer has no such",
        ),
        (
            lambda w: w.update({"k_proj.weight": torch.ones(32, 32)}),
            r"k_proj.weight: expected \(16, 32\).*\(32, 32\)",
        ),
    ],
)
def test_other_weights_are_refused(change, message):
    config = llama()
    weights = dict(AutoModelForCausalLM.from_config(config).model.layers[0].self_attn.state_dict())
    change(weights)
    with pytest.raises(ValueError, match=message):
        hf.from_config(config, weights=weights)


def test_a_model_without_attention_of_a_family():
    with pytest.raises(NotImplementedError, match="got 'bloom'"):
        hf.replace(
            AutoModelForCausalLM.from_config(CONFIG_MAPPING["bloom"](hidden_size=32, n_head=4, n_layer=1))
        )


def test_a_layer_by_itself():
    """With the weights of the module, whose tensors it takes, and on any device."""
    config = llama()
    module = AutoModelForCausalLM.from_config(config).model.layers[1].self_attn
    layer = hf.from_config(config, 1, weights=module.state_dict())
    assert type(layer) is GroupedQueryAttention
    assert (layer.rope, layer.mask, layer.num_kv_heads) == (Rope(8), CAUSAL, 2)
    assert layer.q_proj.weight.data_ptr() == module.q_proj.weight.data_ptr()
    assert hf.from_config(config, device="meta", dtype=torch.bfloat16).o_proj.weight.dtype == torch.bfloat16


# A replaced model


@pytest.mark.parametrize("family", [*DECODERS, *recent()])
def test_a_saved_folder_is_the_familys_own(family, tmp_path):
    """It opens as the family's model, and in a replaced one."""
    torch.manual_seed(0)
    model = small(family).eval()
    ours = hf.replace(copy.deepcopy(model))
    ours.save_pretrained(tmp_path)
    theirs = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    for (name, x), y in zip(model.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    other = hf.replace(small(family))
    other.load_state_dict(theirs.state_dict())
    for (name, x), y in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_weights_stay_frozen(family):
    """One by one; those that were fused, together."""
    model = small(family).requires_grad_(False)
    name = (
        "model.layers.1.self_attn.k_proj.weight"
        if family == "llama"
        else "transformer.h.1.attn.c_attn.weight"
    )
    model.get_parameter(name).requires_grad_()
    learning = [name for name, x in hf.replace(model).named_parameters() if x.requires_grad]
    parts = ["k_proj"] if family == "llama" else ["q_proj", "k_proj", "v_proj"]
    assert learning == [f"{name.rsplit('.', 2)[0]}.layer.{part}.weight" for part in parts]


def test_a_field_that_transformers_ignores_is_refused_with_the_way_out():
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gemma3_text"](**SIZES | {"attn_logit_softcapping": 0.01})
    ).eval()
    tokens = torch.arange(9)[None]
    expected = model(tokens).logits
    with pytest.raises(NotImplementedError, match=r"None, got 0.01; .* config.attn_logit_softcapping = None"):
        hf.replace(model)
    model.config.attn_logit_softcapping = None
    torch.testing.assert_close(hf.replace(model)(tokens).logits, expected)


def test_a_family_that_is_refused_is_left_alone():
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gemma2"](**SIZES | {"use_bidirectional_attention": True})
    )
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match="use_bidirectional_attention"):
        hf.replace(model)
    assert model.config._attn_implementation == before
