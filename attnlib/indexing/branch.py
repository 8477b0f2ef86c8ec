"""The weights of an index branch, and the index queries, keys and weights that it computes."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..rope.rope import Angles, rotate
from ..rope.scaling import scaled_by_position
from .indexer import Indexer


class IndexTensors(NamedTuple):
    """Index queries ``[..., HI, dI]``, keys ``[..., dI]``, and fp32 weights ``[..., HI]``, None without.

    With ``norm_after_pool``, keys are neither normalized nor rotated yet.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor | None


class IndexBranch(nn.Module):
    """The index branch of an attention layer with inputs of ``hidden_size`` channels.

    ``q_lora_rank`` is the size of the q latent, for ``source="latent"``. The inputs are detached, so that a
    loss of the scores trains this branch only.

    Parameters have names of transformers, with these exceptions: ``q_proj`` and ``k_proj`` are ``wq_b`` and
    ``wk`` in DeepSeek-V3.2 and its successors, and the first and the last rows of ``index_qk_proj`` in Qwen
    4; ``q_norm`` and ``k_norm`` are its ``q_layernorm`` and ``k_layernorm``; ``query_scale`` and
    ``query_bias`` are ``softmax_scaling.scale`` and ``.bias`` in Mistral Large 4. MiniMax-M3 and Qwen 4 store
    the weights of norms minus 1.

    Raises:
        ValueError: ``q_lora_rank`` is missing, or given without need.
    """

    indexer: Indexer
    q_proj: nn.Linear
    k_proj: nn.Linear
    k_norm: nn.Module
    q_norm: nn.Module | None
    q_input_norm: nn.Module | None
    weights_proj: nn.Linear | None
    query_scale: nn.Parameter | None
    query_bias: nn.Parameter | None

    def __init__(
        self,
        indexer: Indexer,
        hidden_size: int,
        *,
        q_lora_rank: int | None = None,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if (q_lora_rank is None) == (indexer.source == "latent"):
            expected = "the size of the q latent" if q_lora_rank is None else "None"
            raise ValueError(
                f"q_lora_rank: expected {expected} for source={indexer.source!r}, got {q_lora_rank}"
            )
        self.indexer = indexer
        made = {"device": device, "dtype": dtype}
        precise = {"device": device, "dtype": torch.float32 if indexer.fp32 else dtype}
        linear = partial(nn.Linear, bias=False)
        self.q_proj = linear(q_lora_rank or hidden_size, indexer.heads * indexer.head_dim, **made)
        self.k_proj = linear(hidden_size, indexer.head_dim, **made)
        norm = nn.LayerNorm if indexer.norms == "layer" else nn.RMSNorm
        self.k_norm = norm(indexer.head_dim, eps=norm_eps, **precise)
        self.q_norm = norm(indexer.head_dim, eps=norm_eps, **made) if indexer.norms == "rms" else None
        normed = indexer.source == "normed"
        self.q_input_norm = nn.LayerNorm(hidden_size, eps=norm_eps, **made) if normed else None
        self.weights_proj = linear(hidden_size, indexer.heads, **precise) if indexer.weighted else None
        for name in ("query_scale", "query_bias"):
            learnt = nn.Parameter(torch.empty(indexer.heads, **made)) if indexer.query_scale else None
            self.register_parameter(name, learnt)
        self._reset_own()

    def reset_parameters(self) -> None:
        """Initialize every parameter in place; works after ``to_empty``."""
        for module in self.children():
            module.reset_parameters()
        self._reset_own()

    def _reset_own(self) -> None:
        if self.query_scale is not None:
            nn.init.zeros_(self.query_scale)
            nn.init.ones_(self.query_bias)

    def forward(
        self,
        x: Tensor,
        latent: Tensor | None = None,
        *,
        angles: Angles | None = None,
        positions: Tensor | None = None,
    ) -> IndexTensors:
        """Return the index queries, keys and weights of x ``[b, s, m]``, or packed ``[t, m]``.

        ``latent`` ``[..., q_lora_rank]`` is the normalized q latent, for ``source="latent"``. ``angles`` are
        those of the indexer's rope at the tokens of x. ``positions`` ``[b, s]``, ``[s]`` or packed ``[t]``
        are only read for ``query_scale``.

        Raises:
            ValueError: an argument is missing, or a latent or angles are given without need.
        """
        indexer = self.indexer
        _check_given("latent", latent, indexer, "source", needed=indexer.source == "latent")
        _check_given("angles", angles, indexer, "rope", needed=indexer.rope is not None)
        if indexer.query_scale:
            _check_given("positions", positions, indexer, "query_scale", needed=True)
        x = x.detach()
        keys, queries = self.keys(x, angles), self._queries(x, latent, positions)
        if indexer.rope is not None:  # YaRN's amplitude of queries and of keys
            queries = self._rotated(queries, angles, indexer.rope.amplitude**2)
        if not indexer.weighted:
            return IndexTensors(queries, keys, None)
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype))
        return IndexTensors(queries, keys, weights.to(torch.promote_types(weights.dtype, torch.float32)))

    def keys(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Return only the index keys ``[..., dI]`` of x, those of :meth:`forward`."""
        keys = self.k_proj(x.detach())
        return keys if self.indexer.norm_after_pool else self.finished(keys, angles)

    def finish(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Normalize pooled keys ``[..., n, dI]``, and rotate them; blocks begin at ``positions``."""
        rope = self.indexer.rope
        return self.finished(pooled, None if rope is None else rope.angles(positions))

    def finished(self, keys: Tensor, angles: Angles | None) -> Tensor:
        """Normalize keys ``[..., dI]`` and rotate them by ``angles``, None without a rope."""
        keys = _normed(self.k_norm, keys)
        return keys if angles is None else self._rotated(keys[..., None, :], angles)[..., 0, :]

    def extra_repr(self) -> str:
        return str(self.indexer)

    def _queries(self, x: Tensor, latent: Tensor | None, positions: Tensor | None) -> Tensor:
        source = x if latent is None else latent.detach()
        source = source if self.q_input_norm is None else self.q_input_norm(source)
        queries = self.q_proj(source).unflatten(-1, (-1, self.indexer.head_dim))
        queries = queries if self.q_norm is None else _normed(self.q_norm, queries)
        if self.query_scale is None:
            return queries
        return scaled_by_position(queries, positions, self.query_scale, self.query_bias)

    def _rotated(self, x: Tensor, angles: Angles, gain: float = 1.0) -> Tensor:
        """Rotate heads, and multiply their rotated channels by ``gain``."""
        dim = self.indexer.rope.dim
        moved = dim if self.indexer.rope_place == "last" else 0
        x = rotate(x.roll(moved, -1) if moved else x, angles)
        x = x if gain == 1 else torch.cat((x[..., :dim] * gain, x[..., dim:]), -1)
        return x.roll(-moved, -1) if moved else x


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize x in the dtype of the norm's weights, and round the result to the dtype of x."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def _check_given(name: str, given: object, indexer: Indexer, field: str, *, needed: bool) -> None:
    """Raise ValueError if an argument is missing, or given without need, as a field of the indexer says."""
    if needed != (given is not None):
        expected, got = ("a value", "None") if needed else ("None", type(given).__name__)
        has = f"{field}={getattr(indexer, field)!r}"
        raise ValueError(f"{name}: expected {expected} for an indexer with {has}, got {got}")
