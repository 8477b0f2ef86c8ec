"""Mistral Large 4: its index branches, learnt factors of queries and ropes, and readers of latents."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...indexing import Indexer
from ...rope.rope import Angles, Rope
from ...rope.scaling import scaled_by_position, scaling_of
from .indexers import has_indexer


class LearntRope(Rope):
    """A rope whose frequencies have learnt factors ``exp(alpha)``, which the model holds."""

    __slots__ = ()

    def angles(self, positions: Tensor, *, length: int | None = None) -> NoReturn:
        """Always raise ValueError, because the factors are unknown."""
        raise ValueError(
            "angles: expected those of the model, which holds learnt factors of the frequencies, got None; "
            "pass angles=layer.rope.learnt_angles(positions, alpha), with alpha of the model's rotary_emb"
        )

    def learnt_angles(self, positions: Tensor, alpha: Tensor, *, length: int | None = None) -> Angles:
        """Return the angles at integer ``positions`` ``[...]``, which have gradients for ``alpha``.

        Some scalings need the ``length`` of the sequence.
        """
        frequencies = self.inverse_frequencies(length=length, device=positions.device) * alpha.float().exp()
        phases = positions[..., None].float() * frequencies
        return Angles(phases.cos(), phases.sin(), self.interleaved)


class LearntTemperature(nn.Module):
    """A factor on the queries of head h at position i, which is learnt: ``scale_h * ln(i + 1) + bias_h``."""

    def __init__(self, heads: int, **factory: Any):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(heads, **factory))
        self.bias = nn.Parameter(torch.empty(heads, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters in place, for factors of 1."""
        nn.init.zeros_(self.scale)
        nn.init.ones_(self.bias)

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return ``q`` ``[..., h, d]`` scaled for tokens at integer ``positions`` ``[...]``."""
        return scaled_by_position(q, positions, self.scale, self.bias)


def mistral_large_options(config: Any, index: int) -> dict[str, Any]:
    """Return the sizes of a layer, and whether it has keys of its own.

    Raises:
        NotImplementedError: the layer reads another layer than in transformers, which does not follow
            ``kv_source_layers`` if several layers share latents.
    """
    rotates, source = config.no_rope_layers[index], config.kv_source_layers[index]
    alike = [i for i in range(index) if bool(config.no_rope_layers[i]) == bool(rotates)]
    shared = [i for i in alike if config.kv_sharing_modes[i] == "store"]
    if source != index and [source] != shared[-1:]:
        raise NotImplementedError(
            f"kv_source_layers: expected {shared[-1:]} for layer {index}, the last one before it that shares "
            f"latents and rotates alike, which transformers reads, got {source}"
        )
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    if rotates:
        return {"own_keys": source == index}
    fields = dict(config.rope_parameters)
    scaling = scaling_of(fields, max_position=config.max_position_embeddings)
    return {
        "own_keys": source == index,
        "qk_nope_head_dim": nope + rope,
        "qk_rope_head_dim": 0,
        "scale": (nope + rope) ** -0.5 * Rope(rope, fields["rope_theta"], scaling).latent_scale,
    }


def mistral_large_indexer(config: Any, index: int, rope: Rope | None) -> Indexer | None:
    """Return the index branch of a layer, or None if the layer reads the choice of an earlier one."""
    if not has_indexer(config, index):
        return None
    sizes = {"heads": config.index_n_heads, "head_dim": config.index_head_dim, "top": config.index_topk}
    return Indexer(**sizes, source="normed", query_scale=True, rope=rope)


def finish_mistral_large(layer: nn.Module, config: Any, factory: dict[str, Any]) -> None:
    """Give a layer its learnt factors, and the norm of its latents the epsilon of the config."""
    layer.temperature = LearntTemperature(layer.num_heads, **factory)
    if layer.own_keys:
        layer.kv_a_layernorm.eps = config.rms_norm_eps
