"""Convert a trained decoder to GQA and to MLA, each by a simple and by a better method."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from decoder import Block, Decoder
from torch import Tensor, nn
from variants import Preset

from attnlib import GroupedQueryAttention, MultiHeadLatentAttention
from attnlib.convert import Calibration, calibrate, gqa_to_mla, mha_to_gqa
from attnlib.convert.latent.attended import Attended
from attnlib.convert.latent.cost import Cost
from attnlib.convert.latent.deepseek_layer import gqa_to_deepseek
from attnlib.convert.latent.layers import join, to_latent
from attnlib.convert.latent.truncation import truncate
from attnlib.convert.weights import split

# Conversions approximate attention scores at distances up to 2048 tokens, because tokens further back matter
# less. This is 16 times the context of the default preset.
REACH = 2048
# A converted MLA layer must not normalize its latents. A large constant channel and equally large norm
# weights cancel the norm. Adam would hardly change values that large, and weight decay would only shift them.
IDENTITY = ("kv_a_layernorm.weight", "kv_a_proj_with_mqa.bias")

MEAN, ALIGNED, PRINCIPAL = "GQA, mean-pool", "GQA, regroup + align", "GQA, principal"
PLAIN, WHITENED, LATENT = "MLA, plain SVD", "MLA, whitened", "MLA, as DeepSeek"

Convert = Callable[[GroupedQueryAttention, Calibration], nn.Module]


def ways(preset: Preset) -> dict[str, Convert]:
    """Return the conversions by name; each turns an attention layer and its calibration into a new layer.

    The GQA layers store ``2 * kv_heads * head_dim`` values per token, the MLA layers ``kv_lora_rank +
    rope_dim``.
    """
    heads, rank, rope_dim = preset.kv_heads, preset.kv_lora_rank, preset.rope_dim
    return {
        MEAN: lambda layer, _: mha_to_gqa(layer, heads),
        # Weighting the merged heads by their energy gives 3.39 bits per byte before training, and weighting
        # them equally gives 3.47 (tiny preset, 8 heads merged to 2).
        ALIGNED: lambda layer, seen: mha_to_gqa(
            layer, heads, merge="energy", align="all", grouping="similar", calibration=seen
        ),
        PRINCIPAL: lambda layer, seen: mha_to_gqa(layer, heads, calibration=seen, reach=REACH),
        PLAIN: partial(latent_by_plain_svd, rank=rank, rope_dim=rope_dim),
        WHITENED: lambda layer, seen: gqa_to_mla(
            layer, rank, rope_dim=rope_dim, calibration=seen, reach=REACH
        ),
        LATENT: lambda layer, seen: gqa_to_deepseek(
            layer, rank, rope_dim=rope_dim, calibration=seen, reach=REACH
        ),
    }


def latent_by_plain_svd(
    layer: GroupedQueryAttention, calibration: Calibration, *, rank: int, rope_dim: int
) -> MultiHeadLatentAttention:
    """Convert like :func:`gqa_to_mla`, but choose the latent by an SVD of the weights alone.

    The rotary channels are those of :func:`gqa_to_mla`; only the latent ignores the calibration.
    """
    options = {"rope_dim": rope_dim, "calibration": calibration, "reach": REACH}
    new = gqa_to_mla(layer, rank, **options)
    with torch.no_grad():
        heads = split(layer.state_dict(), head_dim=layer.head_dim, rope=layer.rope)
        white = Attended.white(layer.hidden_size + 1, layer.q_proj.weight.device)
        whole = to_latent(heads, None, **options)
        cut = truncate(whole, rank, white, Cost.plain(whole, heads, white))
        new.load_state_dict(join(cut, layer.state_dict()))
    return new


def seen_by_layers(model: Decoder, batches: Sequence[Tensor]) -> list[Calibration]:
    """Return the calibration of each attention layer on batches of tokens ``[b, t]``."""
    blocks = [(partial(_run, block), block.attention) for block in model.blocks]
    with torch.no_grad():
        return list(calibrate(blocks, [model.embed(tokens) for tokens in batches]))


def _run(block: Block, x: Tensor) -> Tensor:
    return block(x, kv=None, angles=None, cu_seqlens=None)


def student(model: Decoder, convert: Convert, calibrations: Sequence[Calibration]) -> Decoder:
    """Return a copy of a model with converted attention layers.

    The parameters in IDENTITY, which cancel the norm of latents, are frozen.
    """
    new = deepcopy(model)
    new.replace_attention(
        [convert(block.attention, seen) for block, seen in zip(model.blocks, calibrations, strict=True)]
    )
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(not name.endswith(IDENTITY))
    return new
