"""The arithmetic of one attention layer: its parameters, its FLOPs, and what a decoding step reads.

Parameters are those of the layer alone: no embedding, MLP or block norm. A multiplication with its addition
is two FLOPs; only matrix products are counted, since norms, rope, softmax and biases are a per cent of them.
Of a causal prompt only the visible half is counted.
"""

from dataclasses import dataclass, replace

import torch

from ..internal.signatures import kind
from ..kv import KVLayout


@kind
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedShape:
    """The sizes of a :class:`attnlib.GroupedQueryAttention`: MHA with as many KV heads as heads, MQA with
    one.

    Raises:
        ValueError: a size is below 1, or the KV heads do not divide the heads.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        _check(self, "hidden_size", "num_heads", "num_kv_heads", "head_dim", "window")
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
        """Elements of the projections' matrices: the multiplications of one token's projections."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def parameters(self) -> int:
        biases = self.bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        biases += self.output_bias * self.hidden_size
        return self.weights + biases + self.qk_norm * 2 * self.head_dim + self.sinks * self.num_heads

    @property
    def prompt_pair(self) -> int:
        """Multiplications of one query with one key and its value, over all heads, in a prompt."""
        return self.num_heads * 2 * self.head_dim

    @property
    def step_pair(self) -> int:
        """The same in a decoding step."""
        return self.prompt_pair

    def layout(self, *, dtype: torch.dtype, store: torch.dtype | None = None) -> KVLayout:
        """What one token stores."""
        return KVLayout.grouped(
            self.num_kv_heads, self.head_dim, window=self.window, dtype=dtype, store=store
        )

    def shard(self, ranks: int) -> "GroupedShape":
        """One rank of tensor parallelism. KV heads are sharded, or copied where there are more ranks than
        heads.

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
    """The sizes of a :class:`attnlib.MultiHeadLatentAttention`; ``qk_rope_head_dim=0`` is MLA without rope.

    Raises:
        ValueError: a size is below 1 (``qk_rope_head_dim``: 0).
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        names = (
            "hidden_size",
            "num_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
            "window",
        )
        _check(self, *names)
        _check(self, "qk_rope_head_dim", least=0)

    @property
    def kind(self) -> str:
        return f"MLA {self.kv_lora_rank}" + (f"+{self.qk_rope_head_dim}" if self.qk_rope_head_dim else "")

    @property
    def weights(self) -> int:
        """Elements of the projections' matrices: the multiplications of one token's projections in either
        form.

        Absorbing takes the up-projections of keys and values to the query and the output: as many
        multiplications.
        """
        q_width = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        query = self.hidden_size * q_width if rank is None else rank * (self.hidden_size + q_width)
        down = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + self.num_heads * self.v_head_dim * self.hidden_size

    @property
    def parameters(self) -> int:
        norms = self.kv_lora_rank + (self.q_lora_rank or 0)
        return self.weights + norms

    @property
    def prompt_pair(self) -> int:
        """Multiplications of one query with one key and its value, over all heads, in the prompt's cheaper
        form.
        """
        expanded = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return min(expanded, self.step_pair)

    @property
    def step_pair(self) -> int:
        """The same in a decoding step, which is absorbed: latents are both keys and values."""
        return self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)

    def layout(self, *, dtype: torch.dtype, store: torch.dtype | None = None) -> KVLayout:
        """What one token stores."""
        options = {"window": self.window, "dtype": dtype, "store": store}
        return KVLayout.latent(self.kv_lora_rank, self.qk_rope_head_dim, **options)

    def shard(self, ranks: int) -> "LatentShape":
        """One rank of tensor parallelism: a share of the heads, and all of the latent.

        Raises:
            ValueError: the heads cannot be sharded evenly.
        """
        _check_ranks(self.num_heads, ranks)
        return replace(self, num_heads=self.num_heads // ranks)


Shape = GroupedShape | LatentShape


@kind
def prefill_flops(shape: Shape, length: int) -> int:
    """FLOPs of a causal prompt of ``length`` tokens in one layer.

    >>> prefill_flops(GroupedShape(hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=16), 3)
    62976
    """
    return 2 * (length * shape.weights + _visible_pairs(length, shape.window) * shape.prompt_pair)


@kind
def decode_flops(shape: Shape, context: int, *, ranks: int = 1) -> int:
    """FLOPs of one token in one layer, as the last of ``context`` tokens.

    Where ``ranks`` share the tokens of a cache, those of the rank that has most of them, for the queries of
    ``shape``.
    """
    return 2 * (shape.weights + _seen(context, shape.window, ranks) * shape.step_pair)


@kind
def decode_bytes(
    shape: Shape,
    context: int,
    *,
    batch: int,
    dtype: torch.dtype,
    store: torch.dtype | None = None,
    ranks: int = 1,
) -> int:
    """Bytes that a step of ``batch`` tokens reads in one layer: the weights once, and each sequence's visible
    keys.

    Where ``ranks`` share the tokens of a cache, those of the rank that has most of them.
    """
    cached = batch * _seen(context, shape.window, ranks) * shape.layout(dtype=dtype, store=store).token_bytes
    return shape.parameters * dtype.itemsize + cached


def _seen(context: int, window: int | None, ranks: int = 1) -> int:
    """Keys that the last query sees, of those on one rank; a window is whole on each."""
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    return -(-context // ranks) if window is None else min(context, window)


def _visible_pairs(length: int, window: int | None) -> int:
    """Query-key pairs of a causal prompt: 1 + 2 + ... up to the window, and a whole window from then on."""
    rising = _seen(length, window)
    return rising * (rising + 1) // 2 + (length - rising) * rising


def _check(shape: Shape, *names: str, least: int = 1) -> None:
    for name in names:
        size = getattr(shape, name)
        if size is not None and size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")


def _check_ranks(num_heads: int, ranks: int) -> None:
    if ranks < 1 or num_heads % ranks:
        raise ValueError(f"ranks: expected a divisor of num_heads={num_heads}, got {ranks}")
