"""Arithmetic of one attention layer: its parameters, its FLOPs, and the bytes read per decoding step.

Parameters are those of the attention layer only, without embedding, MLP or block norm. A multiply-add counts
as two FLOPs. FLOPs include only matrix products, since norms, rope, softmax and biases add only about 1 %. In
a causal prompt, only the visible half of the query-key pairs counts.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..gate import Gate
from ..internal.signatures import kind
from ..kv import KVLayout


@kind
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedShape:
    """The sizes of a :class:`attnlib.GroupedQueryAttention` layer.

    The layer is MHA if it has as many KV heads as query heads, and MQA if it has one KV head. With
    ``own_keys=False``, it reads the cache of another layer and stores nothing. With ``values="keys"``, it has
    no v_proj. Each query reads ``selected`` of the keys that it sees, or all of them.

    Raises:
        ValueError: a size is below 1, or ``num_heads`` is not a multiple of ``num_kv_heads``.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    selected: int | None = None
    bias: bool = False  # biases of the q, k and v projections
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    gate: Gate | None = None
    own_keys: bool = True
    values: Literal["keys"] | None = None  # "keys": the layer has no v_proj

    def __post_init__(self) -> None:
        _check(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim", "window", "selected")
        if self.values not in (None, "keys"):
            raise ValueError(f'values: expected "keys" or None, got {self.values!r}')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}"
            )

    @property
    def kind(self) -> str:
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else f"GQA-{self.num_kv_heads}"

    @property
    def weights(self) -> int:
        """The number of elements in the projection matrices, each of which multiplies once per token."""
        heads = 2 * self.num_heads + self._projected_kv_heads
        return self.hidden_size * (
            self.head_dim * heads + _gate_rows(self.gate, self.num_heads, self.head_dim)
        )

    @property
    def _projected_kv_heads(self) -> int:
        """The number of heads that k_proj and v_proj have together."""
        return self.own_keys * (2 if self.values is None else 1) * self.num_kv_heads

    @property
    def parameters(self) -> int:
        biases = self.bias * self.head_dim * (self.num_heads + self._projected_kv_heads)
        biases += self.output_bias * self.hidden_size
        biases += _gate_biases(self.gate, self.num_heads, self.head_dim)
        return (
            self.weights
            + biases
            + self.qk_norm * (1 + self.own_keys) * self.head_dim
            + self.sinks * self.num_heads
        )

    @property
    def prompt_pair(self) -> int:
        """Multiplications of all heads per query-key pair of a prompt, for scores and weighted values."""
        return self.num_heads * 2 * self.head_dim

    @property
    def step_pair(self) -> int:
        """Multiplications of all heads per query-key pair of a decoding step, the same as in a prompt."""
        return self.prompt_pair

    def layout(self, *, dtype: torch.dtype, storage_dtype: torch.dtype | None = None) -> KVLayout:
        """Return the layout of the cache that this layer reads: the values stored per token."""
        return KVLayout.grouped(
            self.num_kv_heads, self.head_dim, window=self.window, dtype=dtype, storage_dtype=storage_dtype
        )

    def shard(self, ranks: int) -> "GroupedShape":
        """Return the shape on one tensor-parallel rank.

        KV heads are sharded too; if there are more ranks than KV heads, several ranks hold the same KV head.

        Raises:
            ValueError: the heads cannot be sharded evenly.
        """
        _check_ranks(self.num_heads, ranks)
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ValueError(
                f"ranks: expected a divisor or multiple of num_kv_heads={self.num_kv_heads}, got {ranks}"
            )
        num_kv_heads = max(1, self.num_kv_heads // ranks)
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=num_kv_heads)


@kind
@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The sizes of a :class:`attnlib.MultiHeadLatentAttention` layer; without rope, the rope size is 0.

    Each query reads ``selected`` of the keys that it sees, or all of them.

    Raises:
        ValueError: a size is below 1, or ``qk_rope_head_dim`` is below 0.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    window: int | None = None
    selected: int | None = None
    gate: Gate | None = None
    own_keys: bool = True

    def __post_init__(self) -> None:
        _check(self, "hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank", "window", "selected")
        _check(self, "qk_nope_head_dim", "v_head_dim")
        _check(self, "qk_rope_head_dim", least=0)

    @property
    def kind(self) -> str:
        return f"MLA {self.kv_lora_rank}" + (f"+{self.qk_rope_head_dim}" if self.qk_rope_head_dim else "")

    @property
    def weights(self) -> int:
        """The number of elements in the projection matrices, each of which multiplies once per token.

        This holds for the expanded form of MLA and for the absorbed form, which applies the up-projections of
        keys and values to the query and the output instead.
        """
        q_width = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        query = self.hidden_size * q_width if rank is None else rank * (self.hidden_size + q_width)
        down = self.own_keys * self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        gates = _gate_rows(self.gate, self.num_heads, self.v_head_dim)
        return query + down + up + self.hidden_size * (self.num_heads * self.v_head_dim + gates)

    @property
    def parameters(self) -> int:
        biases = _gate_biases(self.gate, self.num_heads, self.v_head_dim)
        norms = self.own_keys * self.kv_lora_rank + (self.q_lora_rank or 0)
        return self.weights + biases + norms

    @property
    def prompt_pair(self) -> int:
        """Multiplications that all heads need per query-key pair in a prompt, in the cheaper form of MLA.

        The expanded form has full keys and values for each head; in the absorbed form, latents replace both.
        Queries that select keys of their own take the absorbed form.
        """
        if self.selected is not None:
            return self.step_pair
        expanded = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return min(expanded, self.step_pair)

    @property
    def step_pair(self) -> int:
        """Multiplications that all heads need per query-key pair in a decoding step, in MLA's absorbed form.

        In this form, the latents serve as both keys and values.
        """
        return self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)

    def layout(self, *, dtype: torch.dtype, storage_dtype: torch.dtype | None = None) -> KVLayout:
        """Return the layout of the cache that this layer reads: the values stored per token."""
        options = {"window": self.window, "dtype": dtype, "storage_dtype": storage_dtype}
        return KVLayout.latent(self.kv_lora_rank, self.qk_rope_head_dim, **options)

    def shard(self, ranks: int) -> "LatentShape":
        """Return the shape on one tensor-parallel rank, which has some of the heads and the whole latent.

        Raises:
            ValueError: the heads cannot be sharded evenly.
        """
        _check_ranks(self.num_heads, ranks)
        return replace(self, num_heads=self.num_heads // ranks)


Shape = GroupedShape | LatentShape


@kind
def prefill_flops(shape: Shape, length: int) -> int:
    """Return the FLOPs of one layer for a causal prompt of ``length`` tokens.

    >>> shape = GroupedShape(hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=16)
    >>> prefill_flops(shape, 3)
    62976
    """
    return 2 * (length * shape.weights + _visible_pairs(length, shape) * shape.prompt_pair)


@kind
def decode_flops(shape: Shape, context: int, *, ranks: int = 1) -> int:
    """Return the FLOPs of one layer to decode one token, the last of ``context`` tokens.

    If ``ranks`` ranks each store some tokens of a cache, these are the FLOPs of the rank with the most
    tokens. That rank computes all query heads of ``shape``.
    """
    return 2 * (shape.weights + _seen(context, shape, ranks) * shape.step_pair)


@kind
def decode_bytes(
    shape: Shape,
    context: int,
    *,
    batch: int,
    dtype: torch.dtype,
    storage_dtype: torch.dtype | None = None,
    ranks: int = 1,
) -> int:
    """Return how many bytes one layer reads in a decoding step of ``batch`` sequences.

    A step reads the weights once, and the visible keys and values of each sequence. If ``ranks`` ranks each
    store some tokens of a cache, this is the number for the rank with the most tokens.
    """
    cached = (
        batch
        * _seen(context, shape, ranks)
        * shape.layout(dtype=dtype, storage_dtype=storage_dtype).token_bytes
    )
    return shape.parameters * dtype.itemsize + cached


def _gate_rows(gate: Gate | None, num_heads: int, value_dim: int) -> int:
    """Return the number of rows of a gate's projection, 0 without a gate."""
    return 0 if gate is None else gate.rows(num_heads, value_dim)


def _gate_biases(gate: Gate | None, num_heads: int, value_dim: int) -> int:
    return 0 if gate is None else gate.bias * gate.rows(num_heads, value_dim)


def _seen(context: int, shape: Shape, ranks: int = 1) -> int:
    """Return how many keys the last query reads on one rank; a rank stores all keys of a window."""
    if ranks < 1 or (ranks > 1 and shape.selected is not None):
        most = "at least 1" if shape.selected is None else "1 for a layer whose queries select keys"
        raise ValueError(f"ranks: expected {most}, got {ranks}")
    stored = -(-context // ranks) if shape.window is None else min(context, shape.window)
    return stored if shape.selected is None else min(stored, shape.selected)


def _visible_pairs(length: int, shape: Shape) -> int:
    """Return the number of visible query-key pairs in a causal prompt: 1 + 2 + ... + window + window + ..."""
    rising = _seen(length, shape)
    return rising * (rising + 1) // 2 + (length - rising) * rising


def _check(shape: Shape, *names: str, least: int = 1) -> None:
    for name in names:
        size = getattr(shape, name)
        if size is not None and size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")


def _check_ranks(num_heads: int, ranks: int) -> None:
    if ranks < 1 or num_heads % ranks:
        raise ValueError(f"ranks: expected a divisor of num_heads={num_heads}, got {ranks}")
