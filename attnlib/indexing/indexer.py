"""The value that describes an index branch: how it scores keys, and which keys it then chooses."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from ..internal.checks import check_count
from ..internal.signatures import kind
from ..rope.rope import Rope
from ..rope.scaling import check_number

Source = Literal["x", "latent", "normed"]
Norms = Literal["layer", "rms"]
Per = Literal["all", "group"]
RopePlace = Literal["first", "last"]
Pool = Literal["max", "mean"]
CHOICES = MappingProxyType({"source": Source, "norms": Norms, "per": Per, "rope_place": RopePlace})
FLAGS = ("fp32", "query_scale", "weighted", "norm_after_pool", "tail")
GATED = "'max', 'mean' or None, got 'gated'; pools with learnt gates, as in GLM-5.3-Flash, are not supported"


@kind
@dataclass(frozen=True, slots=True)
class Indexer:
    """An index branch: a few small heads that choose the keys, or blocks of keys, which a query attends to.

    Query ``i`` gives key ``j`` the score ``I_ij = scale * sum_h w_ih * relu(q_ih . k_j)``, with one index key
    for all index heads (DeepSeek-AI, 2025, arXiv 2512.02556). The ``top`` keys with the largest scores are
    chosen among the keys up to the query itself; of equal scores, the lower position wins. The defaults
    describe DeepSeek-V3.2, but for ``source="latent"`` and a rope.

    Args:
        heads: the number of index heads.
        head_dim: the channels of each.
        top: entries of a list, which are blocks if ``block_size`` is above 1.
        source: what index queries are projected from: ``"x"``, the layer's input; ``"latent"``, the q latent
            of a latent layer; or ``"normed"``, a LayerNorm of x.
        norms: ``"layer"`` for a LayerNorm of keys, ``"rms"`` for RMS norms of each head's queries and of
            keys.
        fp32: create the norm of keys and the projection of weights in fp32, as in HY 4.
        query_scale: multiply the queries of head h at position i by ``scale_h * ln(i + 1) + bias_h``, which
            are learnt, as in Mistral Large 4.
        activation: ``"relu"``, or None.
        weighted: x gives each head a weight ``w``. Otherwise all weights are 1.
        scale: the factor of scores. None means ``head_dim ** -0.5``, times ``heads ** -0.5`` if weighted.
        per: ``"all"`` for one list of a query, by the sum over index heads; ``"group"`` for a list of each
            KV head, by an index head of its own.
        rope: the rope of queries and keys, or None.
        rope_place: whether the ``"first"`` or the ``"last"`` channels rotate.
        block_size: keys of a block. Blocks begin at key 0 of a sequence.
        pool: how a block is scored: ``"max"`` over the scores of its keys; or ``"mean"``, by the mean of its
            keys, which only complete blocks have.
        norm_after_pool: keys are pooled first, then normalized, then rotated at the position of the block's
            first key, as in Qwen 4.
        local: how many of the last blocks are always chosen; they are part of ``top``. The last block is the
            query's own, or with ``tail`` the last complete one.
        first: how many of the first blocks are always chosen; they are part of ``top``.
        tail: only complete blocks are scored, and an incomplete block that the query is in is always chosen,
            in addition to ``top``.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or fields contradict each other.
        NotImplementedError: pools with learnt gates (GLM-5.3-Flash).

    >>> Indexer(source="latent", rope=Rope(64), top=512).entries
    512
    """

    heads: int = 64
    head_dim: int = 128
    top: int = 2048
    source: Source = "x"
    norms: Norms = "layer"
    fp32: bool = False
    query_scale: bool = False
    activation: Literal["relu"] | None = "relu"
    weighted: bool = True
    scale: float | None = None
    per: Per = "all"
    rope: Rope | None = None
    rope_place: RopePlace = "first"
    block_size: int = 1
    pool: Pool | None = None
    norm_after_pool: bool = False
    local: int = 0
    first: int = 0
    tail: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "top", "block_size"):
            check_count(f"indexer.{name}", getattr(self, name), least=1)
        for name in ("local", "first"):
            check_count(f"indexer.{name}", getattr(self, name))
        for name, values in CHOICES.items():
            self._check_choice(name, get_args(values))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"indexer.{name}: expected a bool, got {getattr(self, name)!r}")
        if isinstance(self.pool, str) and self.pool == "gated":
            raise NotImplementedError(f"indexer.pool: expected {GATED}")
        self._check_choice("pool", (*get_args(Pool), None))
        self._check_choice("activation", ("relu", None))
        if self.scale is not None:
            check_number("indexer.scale", self.scale, above=0)
        self._check_rope()
        self._check_blocks()
        if self.per == "group" and self.weighted:
            raise ValueError(
                "indexer.weighted: expected False with per='group', where each list has one index head, got "
                "True"
            )
        if self.local + self.first > self.top:
            raise ValueError(
                f"indexer.top: expected at least local + first = {self.local + self.first} entries, which "
                f"are always chosen, got {self.top}"
            )

    def _check_choice(self, name: str, known: tuple) -> None:
        value = getattr(self, name)
        if not isinstance(value, str | None) or value not in known:
            raise ValueError(f"indexer.{name}: expected one of {known}, got {value!r}")

    def _check_rope(self) -> None:
        if self.rope is None:
            return
        if not isinstance(self.rope, Rope):
            raise TypeError(f"indexer.rope: expected a Rope or None, got {type(self.rope).__name__}")
        if self.rope.dim > self.head_dim:
            raise ValueError(
                f"indexer.rope: expected dim at most head_dim={self.head_dim}, got {self.rope.dim}"
            )

    def _check_blocks(self) -> None:
        if self.pool is None and self.block_size > 1:
            raise ValueError(
                f"indexer.pool: expected 'max' or 'mean' with block_size={self.block_size}, got None"
            )
        for name in ("pool", "tail"):
            if getattr(self, name) and self.block_size == 1:
                raise ValueError(
                    f"indexer.block_size: expected at least 2 keys with {name}={getattr(self, name)!r}, got 1"
                )
        if self.pool == "mean" and not self.tail:
            raise ValueError(
                "indexer.tail: expected True with pool='mean', since each query would see another mean of an "
                "incomplete block, got False"
            )
        if self.norm_after_pool and self.pool != "mean":
            raise ValueError(
                f"indexer.norm_after_pool: expected False with pool={self.pool!r}, got True; keys are pooled "
                "only by pool='mean'"
            )

    @property
    def entries(self) -> int:
        """The length of a list: ``top``, and one for the tail."""
        return self.top + self.tail

    @property
    def lists(self) -> int:
        """The number of lists of a query: 1, or one for each index head."""
        return self.heads if self.per == "group" else 1

    @property
    def score_scale(self) -> float:
        """The factor of scores, with its default."""
        if self.scale is not None:
            return float(self.scale)
        return (self.head_dim * (self.heads if self.weighted else 1)) ** -0.5
