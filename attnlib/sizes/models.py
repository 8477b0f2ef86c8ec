"""Models, described by their attention layers' shapes, and their variants with other kinds of attention."""

from dataclasses import dataclass, replace

import torch

from ..internal.signatures import kind
from ..kv import KVLayout
from .attention import GroupedShape, LatentShape, Shape


@kind
@dataclass(frozen=True, slots=True)
class Model:
    """The shapes of a model's attention layers, in order; ``source`` names where they were published.

    ``other_parameters`` counts the parameters outside attention: embeddings, MLPs and block norms. None means
    that the number is unknown.

    Raises:
        ValueError: ``layers`` is empty, or ``other_parameters`` is negative.
    """

    name: str
    layers: tuple[Shape, ...]
    source: str = ""
    other_parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: expected at least 1, got none")
        if self.other_parameters is not None and self.other_parameters < 0:
            raise ValueError(f"other_parameters: expected at least 0, got {self.other_parameters}")

    @property
    def kind(self) -> str:
        """The kind of attention in the first layer, such as GQA-8."""
        return self.layers[0].kind

    @property
    def parameters(self) -> int:
        """The number of parameters of all attention layers together."""
        return sum(shape.parameters for shape in self.layers)

    @property
    def total_parameters(self) -> int | None:
        """The number of parameters of the whole model; None if those outside attention are unknown."""
        return None if self.other_parameters is None else self.parameters + self.other_parameters

    def layouts(self, *, dtype: torch.dtype, storage_dtype: torch.dtype | None = None) -> list[KVLayout]:
        """Return the cache layout of each layer that owns keys, which you can pass to KVCache."""
        options = {"dtype": dtype, "storage_dtype": storage_dtype}
        return [shape.layout(**options) for shape in self.layers if shape.own_keys]

    def shard(self, ranks: int) -> "Model":
        """Return the part of the model that one of ``ranks`` tensor-parallel ranks holds.

        The parameters outside attention are divided evenly; a share is rounded up to a whole number.

        Raises:
            ValueError: the heads cannot be sharded evenly.
        """
        layers = tuple(shape.shard(ranks) for shape in self.layers)
        other = None if self.other_parameters is None else -(-self.other_parameters // ranks)
        return replace(self, layers=layers, other_parameters=other)

    def with_window(self, window: int) -> "Model":
        """Return the same model with a sliding window of ``window`` tokens in every layer."""
        return replace(self, layers=tuple(replace(shape, window=window) for shape in self.layers))

    def with_selected(self, selected: int) -> "Model":
        """Return the same model whose queries each select ``selected`` keys in every layer."""
        return replace(self, layers=tuple(replace(shape, selected=selected) for shape in self.layers))


@kind
def variants(
    model: Model, *, kv_lora_rank: int | None = None, qk_rope_head_dim: int | None = None
) -> list[Model]:
    """Return a model's variants in the order MHA, GQA, MQA, MLA; the model itself is one of them.

    GQA variants with more KV heads come first, and MLA with a rotary key comes before MLA without one. GQA-8
    has 8 KV heads, and is omitted if 8 does not divide the number of query heads. Widths, numbers of query
    heads, windows and parameters outside attention stay the same. If an MLA model becomes MHA, GQA or MQA,
    its value width becomes the head dimension. A model that becomes MLA has a full-rank query and a latent of
    512 + 64 channels, as in DeepSeek-V2; a model that is already MLA keeps its own latent sizes.

    >>> [variant.kind for variant in variants(Model("toy", (GroupedShape(
    ...     hidden_size=64, num_heads=16, num_kv_heads=16, head_dim=4),)))]
    ['MHA', 'GQA-8', 'MQA', 'MLA 512+64', 'MLA 512']
    """
    first = model.layers[0]
    own = (first.kv_lora_rank, first.qk_rope_head_dim) if isinstance(first, LatentShape) else (512, 64)
    rank = own[0] if kv_lora_rank is None else kv_lora_rank
    rope = own[1] if qk_rope_head_dim is None else qk_rope_head_dim
    kv_heads = (
        [first.num_heads, 8, 1] if first.num_heads > 8 and first.num_heads % 8 == 0 else [first.num_heads, 1]
    )
    converted = [[_grouped(shape, heads) for shape in model.layers] for heads in kv_heads]
    converted += [[_latent(shape, rank, width) for shape in model.layers] for width in (rope, 0)]
    distinct = dict.fromkeys([model.layers, *map(tuple, converted)])
    return sorted((replace(model, layers=layers) for layers in distinct), key=_order)


def _order(model: Model) -> tuple[bool, int, int]:
    """Return a sort key: grouped layers before latent ones, and the larger cache first among each."""
    first = model.layers[0]
    if isinstance(first, GroupedShape):
        return False, -first.num_kv_heads, 0
    return True, -first.kv_lora_rank, -first.qk_rope_head_dim


def _grouped(shape: Shape, num_kv_heads: int) -> GroupedShape:
    if isinstance(shape, GroupedShape):
        return replace(shape, num_kv_heads=num_kv_heads)
    sizes = {"hidden_size": shape.hidden_size, "num_heads": shape.num_heads, "head_dim": shape.v_head_dim}
    kept = {
        "window": shape.window,
        "selected": shape.selected,
        "gate": shape.gate,
        "own_keys": shape.own_keys,
    }
    return GroupedShape(**sizes, num_kv_heads=num_kv_heads, **kept)


def _latent(shape: Shape, kv_lora_rank: int, qk_rope_head_dim: int) -> LatentShape:
    if isinstance(shape, LatentShape):
        return replace(shape, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    return LatentShape(
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=shape.head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=shape.head_dim,
        window=shape.window,
        selected=shape.selected,
        gate=shape.gate,
        own_keys=shape.own_keys,
    )
