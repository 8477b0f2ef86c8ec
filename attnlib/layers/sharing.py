"""Rotary angles computed once per call for all layers of a model."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..call.trees import tree_of
from ..internal.signatures import kind
from ..masks.band import AnyMask
from ..rope.rope import Angles
from .inputs import Inputs, check
from .positions import angles_of, with_depths


@kind
def shared_angles(
    layers: Sequence[nn.Module],
    x: Tensor,
    *,
    kv: LayerCache | None = None,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: AnyMask | None = None,
) -> list[Angles | None]:
    """Return the rotary angles of x's tokens for each layer, to pass as ``angles``; None without rope.

    Layers with the same rope share one computation. Pass the arguments that the first layer is called with:
    ``x`` ``[b, s, m]``, or packed ``[t, m]`` with ``cu_seqlens``. ``kv`` may be any layer of a cache step.
    Of ``mask`` only a tree matters, whose positions are used if there are no others.

    >>> options = {"mask": CAUSAL, "rope": Rope(16)}
    >>> layers = [GroupedQueryAttention(64, 4, **options) for _ in range(3)]
    >>> x = torch.randn(2, 9, 64)
    >>> for layer, angles in zip(layers, shared_angles(layers, x)):
    ...     x = x + layer(x, angles=angles)

    Raises:
        TypeError: ``layers`` is not a sequence of attention layers.
        ValueError, TypeError: an input does not fit, as in a layer's forward.
    """
    several = isinstance(layers, Sequence | nn.ModuleList)
    if not (several and all(hasattr(layer, "rope") for layer in layers)):
        got = [type(layer).__name__ for layer in layers] if several else type(layers).__name__
        raise TypeError(f"layers: expected a sequence of attention layers, got {got}")
    given = Inputs(kv=kv, positions=positions, cu_seqlens=cu_seqlens, mask=mask)
    for layer in layers[:1]:
        check(x, layer.hidden_size, given, rope=layer.rope, mask=layer.mask, projection=layer.o_proj)
    made: list[tuple] = []  # not a dict: torch.compile would have to hash its keys
    shared = []
    for layer in layers:
        wanted = layer.rope, layer.context_parallel, None if tree_of(layer.mask) is None else layer.mask
        found = next((angles for *of, angles in made if tuple(of) == wanted), None)
        if found is None and layer.rope is not None:
            own = given._replace(context_parallel=layer.context_parallel)
            found = angles_of(layer.rope, x, with_depths(layer, x, own))
            made.append((*wanted, found))
        shared.append(found)
    return shared
