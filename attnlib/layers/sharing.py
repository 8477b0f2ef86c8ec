"""Rotary angles that the layers of a model share in a call."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..internal.signatures import kind
from ..rope.rope import Angles
from .inputs import Inputs, check
from .positions import angles_of


@kind
def shared_angles(
    layers: Sequence[nn.Module],
    x: Tensor,
    *,
    kv: LayerCache | None = None,
    positions: Tensor | Angles | None = None,
    cu_seqlens: Tensor | None = None,
) -> list[Angles | None]:
    """For each of these layers the angles of x's tokens, to be given as its ``positions``; None without a
    rope.

    They are computed once for each rope, not once a layer. ``x`` ``[b, s, m]``, or packed ``[t, m]``, and the
    rest are what the first layer is called with; ``kv`` is any layer of a step.

    >>> layers = [GroupedQueryAttention(64, 4, mask=CAUSAL, rope=Rope(16)) for _ in range(3)]
    >>> x = torch.randn(2, 9, 64)
    >>> for layer, angles in zip(layers, shared_angles(layers, x)):
    ...     x = x + layer(x, positions=angles)

    Raises:
        TypeError: ``layers`` are no attention layers.
        ValueError, TypeError: as a layer's forward does for inputs that do not fit.
    """
    several = isinstance(layers, Sequence | nn.ModuleList)
    if not (several and all(hasattr(layer, "rope") for layer in layers)):
        got = [type(layer).__name__ for layer in layers] if several else type(layers).__name__
        raise TypeError(f"layers: expected a sequence of attention layers, got {got}")
    given = Inputs(kv=kv, positions=positions, cu_seqlens=cu_seqlens)
    for layer in layers[:1]:
        check(x, layer.hidden_size, given, rope=layer.rope, mask=layer.mask, projection=layer.o_proj)
    made: list[tuple] = []  # no mapping, whose keys a compiler would have to hash
    shared = []
    for layer in layers:
        wanted = layer.rope, layer.context_parallel
        found = next((angles for *of, angles in made if tuple(of) == wanted), None)
        if found is None and layer.rope is not None:
            found = angles_of(layer.rope, x, given._replace(context_parallel=layer.context_parallel))
            made.append((*wanted, found))
        shared.append(found)
    return shared
