"""Tiny random models of every family that checkpoints are converted of, and what their attention computes."""

import json
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from families import DECODERS as OTHERS
from families import EYES as OTHER_EYES
from families import HYBRID
from families import RECENT as OTHER_RECENT
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
HEADS, KV_HEADS, GROUPS = 4, 4, 2
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WIDE_HEADS = {"head_dim": 16}  # unlike the width over heads
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
DECODERS = MappingProxyType(
    {
        "llama": WIDE_HEADS | {"attention_bias": True},
        "mistral": WIDE_HEADS,
        "mixtral": WIDE_HEADS | EXPERTS,
        "qwen2": WIDE_HEADS,
        "qwen2_moe": WIDE_HEADS | EXPERTS | {"shared_expert_intermediate_size": 24},
        "qwen3": WIDE_HEADS,
        "qwen3_moe": WIDE_HEADS | EXPERTS,
        "gemma": WIDE_HEADS,
        "gemma2": WIDE_HEADS | {"sliding_window": 64},
        "gemma3_text": WIDE_HEADS | TYPES,
        "phi3": WIDE_HEADS,
        "olmo": WIDE_HEADS,
        "olmo2": WIDE_HEADS,
        "olmo3": WIDE_HEADS | TYPES,
        "granite": WIDE_HEADS
        | {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
        "granitemoe": WIDE_HEADS | EXPERTS,
        "smollm3": WIDE_HEADS | {"no_rope_layers": [0, 1]},
        "starcoder2": WIDE_HEADS,
        "glm4": WIDE_HEADS | {"attention_bias": True},
        "cohere": WIDE_HEADS | {"use_qk_norm": True},
        "cohere2": TYPES,
        "gpt_neox": {"hidden_size": 64},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64},
    }
)
# Families whose storage resembles others'; by default, only the cheap tests run for them.
RECENT = MappingProxyType(
    {
        kind: {
            name: 64 if name == "sliding_window" else x
            for name, x in ((OTHERS | OTHER_RECENT)[kind] | more).items()
            if name not in ("rope_parameters", "num_key_value_heads", "rotary_dim")
        }
        for more, kinds in (
            ({}, "arcee jais2 seed_oss solar_open apertus hy_v3 ernie4_5 ernie4_5_moe phimoe cwm dots1"),
            ({}, "mellum exaone4 exaone_moe afmoe vaultgemma olmoe flex_olmo minimax_m2 granitemoeshared"),
            ({}, "hyperclovax hunyuan_v1_dense hunyuan_v1_moe nemotron stablelm phi persimmon glm glm4_moe"),
            ({"head_dim": 8}, "helium"),
            (WIDE_HEADS, "ministral ministral3"),
            ({}, "qwen3_next granitemoehybrid jamba lfm2 lfm2_moe"),
        )
        for kind in kinds.split()
    }
)
MADE_OF_HEADS = ("gpt_neox", "persimmon", "opt", "gpt2", "bert")  # no key for fewer KV heads
SMALL_EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
EYES = SMALL_EYES | {"image_size": 16, "patch_size": 8}
QWEN_EYES = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
QWEN_EYES |= {"intermediate_size": 24, "fullatt_block_indexes": [0]}
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
SEEING = MappingProxyType(
    {
        "gemma3": {
            "text_config": SIZES | DECODERS["gemma3_text"],
            "vision_config": EYES,
            "mm_tokens_per_image": 4,
        },
        "llava": {
            "text_config": SIZES | {"model_type": "qwen2"},
            "vision_config": EYES | {"model_type": "clip_vision_model"},
        },
        "mistral3": {"text_config": SIZES | WIDE_HEADS, "vision_config": EYES | {"head_dim": 8}},
        "qwen2_vl": {"text_config": SIZES | QWEN_ROPE, "vision_config": QWEN_EYES},
        "qwen2_5_vl": {"text_config": SIZES | QWEN_ROPE, "vision_config": QWEN_EYES},
    }
)  # fmt: skip
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1]}
ROPE_QUARTER = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
MIXED = SECTIONS | {"mrope_section": [4, 2, 2]}
WIDE = SECTIONS | {"mrope_section": [2, 3, 3]}
DEEP = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
RECENTLY_SEEING = MappingProxyType(
    {
        kind: {"text_config": SIZES | text, "vision_config": OTHER_EYES}
        for kind, text in {
            "qwen3_vl": WIDE_HEADS | {"rope_parameters": MIXED | {"rope_theta": 5e5}},
            "qwen3_vl_moe": EXPERTS | WIDE_HEADS | {"rope_parameters": MIXED | {"rope_theta": 5e5}},
            "qwen3_5": HYBRID | {"rope_parameters": WIDE | ROPE_QUARTER},
            "qwen3_5_moe": EXPERTS
            | HYBRID
            | {"rope_parameters": WIDE | ROPE_QUARTER}
            | {"shared_expert_intermediate_size": 24},
            "glm4v": {
                "hidden_size": 64,
                "rope_parameters": WIDE | {"rope_theta": 1e4},
            },
            "glm4v_moe": DEEP
            | WIDE_HEADS
            | {"rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "ernie4_5_vl_moe": {
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": [24, 24],
                "rope_parameters": SECTIONS | {"mrope_section": [1, 1, 2], "rope_theta": 5e5},
            },
        }.items()
    }
)
ALL = (*DECODERS, "bert", *SEEING)
ALL_RECENT = (*RECENT, *RECENTLY_SEEING)
SEES = SEEING | RECENTLY_SEEING
# transformers does not build the text model of Ernie 4.5 VL alone.
STREAMED = tuple(kind for kind in ALL_RECENT if kind != "ernie4_5_vl_moe")


NORM_NAMES, QUERY_KEY = ("{0}_norm", "{0}_layernorm", "{1}_layernorm"), {"q": "query", "k": "key"}


def slow(*kinds: str) -> list:
    """Parameters of a test that only ``-m slow`` runs."""
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def make(kind: str) -> nn.Module:
    """A model of a kind, whose every parameter shows in what it computes."""
    torch.manual_seed(0)
    if kind in SEES:
        tokens = {"image_token_id": 60, "image_token_index": 60, "video_token_id": 59, "boi_token_index": 58}
        known = CONFIG_MAPPING[kind].sub_configs["vision_config"]
        vision = SEES[kind]["vision_config"]
        if kind in RECENTLY_SEEING:
            vision = {name: x for name, x in vision.items() if name in known().to_dict()}
        parts = SEES[kind] | {"vision_config": vision}
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**tokens | parts))
    elif kind == "bert":
        model = AutoModel.from_config(CONFIG_MAPPING[kind](**SIZES))
    else:
        options = SIZES | (DECODERS | RECENT)[kind]
        if kind in MADE_OF_HEADS:
            del options["num_key_value_heads"]
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
    return telling(model).float().eval()


@torch.no_grad()
def telling(model: nn.Module) -> nn.Module:
    """The model, every parameter of which now shows in what it computes."""
    for name, x in model.named_parameters():
        if x.dim() > 1 and "norm" not in name:
            nn.init.normal_(x, std=1.2 * x.shape[-1] ** -0.5)
        else:
            nn.init.uniform_(x, 0.3, 1.2)
    return model


@torch.no_grad()
def equalise(model: nn.Module, *, neighbours: bool = True) -> None:
    """Make the KV heads of each of GROUPS groups the same, with their biases, and gains that are a head's
    own.

    Groups are of neighbours, or of every other head.
    """
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // HEADS
    for name, x in model.named_parameters():
        if (
            not any(part in name for part in ("self_attn", "attention.query_key_value", "c_attn"))
            or "vis" in name
        ):
            continue
        if "qkv_proj" in name:
            _, *rows = x.split([HEADS * dim, KV_HEADS * dim, KV_HEADS * dim])
        elif "query_key_value" in name:  # of one head after another
            _, *rows = x.unflatten(0, (HEADS, 3, dim)).unbind(1)
        elif "c_attn" in name:  # whose weights are [in, out]
            _, *rows = x.T.chunk(3) if x.dim() == 2 else x.chunk(3)
        elif any(part in name for part in ("k_proj", "v_proj")) or ("k_norm" in name and x.numel() > dim):
            rows = (x,)
        else:
            continue
        for part in rows:
            size, at = KV_HEADS // GROUPS, int(neighbours)
            heads = part if "query_key_value" in name else part.unflatten(0, (KV_HEADS, -1))
            grouped = heads.unflatten(0, (GROUPS, size) if neighbours else (size, GROUPS))
            grouped.copy_(grouped.narrow(at, 0, 1).clone().expand_as(grouped))


def load(folder: Path) -> nn.Module:
    """A folder as transformers loads it; anything missing, unexpected or of another shape is an error."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    made = (
        AutoModelForImageTextToText if kind in SEES else AutoModel if kind == "bert" else AutoModelForCausalLM
    )
    model, found = made.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(found.values()), found
    return model.eval()


@torch.no_grad()
def says(model: nn.Module) -> Tensor:
    """What it says of some text, which has no images."""
    out = model(torch.arange(3, 3 + 2 * 11).view(2, 11))
    return out.last_hidden_state if getattr(out, "logits", None) is None else out.logits


def is_as_exact(folder: Path, other: nn.Module) -> bool:
    """Whether a model says what a folder's says: not further from fp64 than twice as far as that in its own
    dtype.
    """
    golden = load(folder)
    naive = says(golden).double()
    if hasattr(golden, "set_experts_implementation"):
        golden.set_experts_implementation("eager")  # torch's product of groups has no fp64
    exact = says(golden.double())
    return bool((says(other).double() - exact).norm() <= 2 * (naive - exact).norm())


@torch.no_grad()
def computed(model: nn.Module) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """What comes into and out of the text's attention layers, without norms and with the usual scale; and its
    gains.
    """
    seen, hooks, gains = [], [], {}

    def keep(module: nn.Module, args: tuple, kwargs: dict, out: object) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        seen.append((x.clone(), (out[0] if isinstance(out, tuple) else out).clone(), gains[module]))

    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith(("Attention", "BertAttention")) and not any(
            x in kind for x in ("Vision", "Self", "Pixtral")
        ):
            if any(x in name for x in ("vision", "visual")):
                continue
            gains[module] = {}
            for norm, name in product(("q_norm", "k_norm"), NORM_NAMES):
                name = name.format(norm[0], QUERY_KEY[norm[0]])
                if hasattr(module, name):
                    found = getattr(module, name).named_parameters()
                    gains[module] |= {f"{norm}.{parameter}": x.detach() for parameter, x in found}
                    setattr(module, name, nn.Identity())
            if hasattr(module, "scaling") and hasattr(module, "head_dim") and kind != "OPTAttention":
                module.scaling = module.head_dim**-0.5
            if hasattr(module, "attn_logit_softcapping"):
                module.attn_logit_softcapping = None
            if kind == "BertAttention":  # whose output has the norm of the block
                module.output.LayerNorm = nn.Identity()
            hooks.append(module.register_forward_hook(keep, with_kwargs=True))
    says(model)
    for hook in hooks:
        hook.remove()
    if model.config.model_type == "bert":
        seen = [(x, y - x, gains) for x, y, gains in seen]
    return seen
