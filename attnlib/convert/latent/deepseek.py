"""Conversion of grouped-query checkpoints to DeepSeek-V3: the layer converter and the new config.json."""

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from ...checkpoint_files.folder import CONFIG
from ...kv import DTYPES
from ...models.families import STORED
from ...rope.rope import Rope
from ...rope.scaling import LinearScaling, Llama3Scaling, YaRNScaling
from ..calibration import Calibration
from ..checkpoint.errors import CheckpointError
from ..checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from ..checkpoint.model import shape_of
from ..checkpoint.names import family_of
from ..checkpoint.source_rope import rope_of
from ..weights import Heads, split
from .attended import usual_scale
from .deepseek_layer import Target, check_target, to_deepseek
from .layers import NORMS
from .norm import Norm

SOURCES = ("llama", "mistral", "qwen2")
CARRIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "dtype",
    "torch_dtype",
)


def converter(
    config: Mapping[str, object],
    rank: int,
    *,
    rope_dim: int = 64,
    calibrations: Callable[[int], Calibration] | None = None,
    reach: int = 2048,
    norm: Norm = "exact",
    q_rank: int | None = None,
    device: torch.device | str = "cpu",
) -> LayerConverter:
    """Return a layer converter to DeepSeek-V3 for a Llama, Mistral or Qwen2 model.

    ``config`` is the model's config.json.

    ``calibrations`` maps a layer index to its calibration; None means :meth:`Calibration.white`, which uses
    only the weights. Computation runs on ``device``, and results are returned on the CPU. The other arguments
    are those of :func:`gqa_to_deepseek`. Each converted layer comes with a complete new config.json,
    including ``model_type``, and with the errors listed in :class:`DeepseekLayer`.

    Raises:
        CheckpointError: DeepSeek-V3 cannot represent the model or one of its options; the message names it.
        ValueError, TypeError, NotImplementedError: as :func:`gqa_to_deepseek`. Unsupported biases and a
            missing calibration text are detected only when the converter runs.
    """
    check_source(config)
    rope = rope_of(config)
    target = Target(rank=rank, rope_dim=rope_dim, reach=reach, norm=norm, q_rank=q_rank)
    sizes = shape_of(config, family_of(config["model_type"]))
    check_target(
        target,
        rope,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        width=sizes.width,
    )

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        weights = {name: value.to(device) for name, value in weights.items()}
        heads = _heads(weights, shape, rope)
        calibration = None if calibrations is None else calibrations(shape.index)
        made = to_deepseek(
            heads, weights, target, scale=usual_scale(rope, shape.head_dim), calibration=calibration
        )
        state = {name: value.cpu() for name, value in made.state.items()}
        return ConvertedLayer(state, deepseek_config(config, state, made.rope, shape), made.errors)

    return convert_layer


def _heads(weights: Mapping[str, Tensor], shape: LayerShape, rope: Rope) -> Heads:
    """Split a layer's weights into heads; raise CheckpointError if they cannot be converted."""
    if small := sorted(name for name, value in weights.items() if value.dtype not in DTYPES):
        dtype = weights[small[0]].dtype
        raise CheckpointError(
            f"layer {shape.index}: {small[0]}: expected 16 bits or more, got {dtype}; cast it first"
        )
    try:
        return split(weights, head_dim=shape.head_dim, rope=rope)
    except ValueError as error:
        raise CheckpointError(f"layer {shape.index}: {error}; such heads cannot be converted") from error


def deepseek_config(
    config: Mapping[str, object], state: Mapping[str, Tensor], rope: Rope, shape: LayerShape
) -> dict[str, object]:
    """Return the config.json of the model ``config`` after conversion of its layers to DeepSeek-V3.

    ``state`` and ``rope`` are those of a layer that :func:`gqa_to_deepseek` returned, and that you may have
    trained since. ``shape`` is the old layer's shape. To write the layer into a checkpoint, put its state
    dict and this config into a :class:`ConvertedLayer`.

    Raises:
        CheckpointError: as :func:`converter`.
    """
    check_source(config)
    return _carried(config) | _attention(state, rope, shape)


def check_source(config: Mapping[str, object]) -> None:
    """Raise CheckpointError unless DeepSeek-V3 can represent the model."""
    kind = config.get("model_type")
    if kind not in SOURCES:
        raise CheckpointError(
            f"{CONFIG}: model_type: expected one of {', '.join(SOURCES)}, which DeepSeek-V3 can represent, "
            f"got {kind}{_norms(kind)}"
        )
    windowed = {
        # transformers uses a window of 4096 if config.json has no sliding_window.
        "mistral": config.get("sliding_window", 4096) is not None,
        "qwen2": bool(config.get("use_sliding_window")),
    }
    layers = config.get("layer_types") or ()
    if windowed.get(kind) or any(layer != "full_attention" for layer in layers):
        raise CheckpointError(
            f"{CONFIG}: expected no sliding window, which DeepSeek-V3 does not support, got one"
        )
    if config.get("mlp_bias"):
        raise CheckpointError(
            f"{CONFIG}: mlp_bias: expected false, as in DeepSeek-V3, got {config['mlp_bias']!r}"
        )
    if config.get("intermediate_size") is None or config.get("vocab_size") is None:
        raise CheckpointError(
            f"{CONFIG}: expected vocab_size and intermediate_size, because DeepSeek-V3 has other defaults"
        )
    if rope_of(config).dim < shape_of(config, family_of(kind)).head_dim:
        raise CheckpointError(
            f"{CONFIG}: partial_rotary_factor: loaders disagree about its meaning for this model"
        )


def _norms(kind: object) -> str:
    """Return a note for an error message if models of this type have norms of q and k."""
    has_norms = isinstance(kind, str) and kind in STORED
    has_norms = has_norms and any("k_norm" in ours for _, ours in STORED[kind].weights)
    return f", which has {NORMS}" if has_norms else ""


def _carried(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config keys that do not change, and mixture-of-experts keys for a model without experts."""
    # transformers uses these token ids if config.json has none.
    begin, end = (None, None) if config["model_type"] == "qwen2" else (1, 2)
    return {key: config[key] for key in CARRIED if key in config} | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "bos_token_id": config.get("bos_token_id", begin),
        "eos_token_id": config.get("eos_token_id", end),
        "first_k_dense_replace": config["num_hidden_layers"],
        "moe_intermediate_size": config["intermediate_size"],
        # llama.cpp aborts unless n_routed_experts is larger than n_group, although no layer has experts.
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def _attention(state: Mapping[str, Tensor], rope: Rope, shape: LayerShape) -> dict[str, object]:
    """Return the config keys for layer sizes, and for rope in both transformers 5's and the older format."""
    rank, q = len(state["kv_a_layernorm.weight"]), state.get("q_a_layernorm.weight")
    theta, scaling = {"rope_theta": rope.theta}, _scaling(rope)
    return {
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None if q is None else len(q),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": len(state["kv_b_proj.weight"]) // shape.heads - shape.head_dim,
        "qk_rope_head_dim": rope.dim,
        "v_head_dim": shape.head_dim,
        "attention_bias": "kv_a_proj_with_mqa.bias" in state,
        "rope_interleave": rope.interleaved,
        **theta,
        "rope_scaling": scaling,
        "rope_parameters": theta | (scaling or {"rope_type": "default"}),
    }


def _scaling(rope: Rope) -> dict[str, object] | None:
    match rope.scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YaRNScaling():
            return _yarn(rope.scaling)
        case None:
            return None


def _yarn(yarn: YaRNScaling) -> dict[str, object]:
    """Return YaRN's parameters under Hugging Face's names, without those that are None.

    ``truncate`` is included only if it is False, because all loaders truncate by default.
    """
    written_below = ("original_max_position", "truncate")
    fields = {
        name: value for name, value in asdict(yarn).items() if name not in written_below and value is not None
    }
    fields |= {"rope_type": "yarn", "original_max_position_embeddings": yarn.original_max_position}
    return fields if yarn.truncate else fields | {"truncate": False}
