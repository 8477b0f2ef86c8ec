"""Positions of a layer's tokens, and their rotary angles."""

import torch
from torch import Tensor, nn

from ..call.trees import refuse_cache, tree_of
from ..kv import KVView
from ..masks.function import MaskFunction, positions_missing
from ..rope.rope import Angles, Rope
from .inputs import Inputs


def with_depths(layer: nn.Module, x: Tensor, given: Inputs) -> Inputs:
    """Return inputs with the depths of x's tokens as positions, if a mask holds a tree and they are needed.

    Given positions are used as they are, as in :func:`angles_of`.

    Raises:
        NotImplementedError: the tree is used with a cache.
        ValueError: nothing gives the positions that the layer's rope or temperature needs, or the tree does
            not fit x.
    """
    if tree_of(layer.mask) is tree_of(given.mask) is None:
        return given
    if given.is_stored:
        refuse_cache(layer.mask)
        refuse_cache(given.mask)
    by_rope = layer.rope is not None and given.angles is None
    if given.positions is not None or not (by_rope or layer.temperature is not None):
        return given
    mask = layer.mask_tensors() if tree_of(given.mask) is None else given.mask
    if mask.tree.positions is None:
        counts = "the layer's rope" if by_rope else "the layer's temperature"
        raise ValueError(f"{positions_missing(counts)}, or pass positions= to the layer")
    depths = _depths(mask, x, given)
    if layer.rope is not None and layer.rope.axes is not None:
        depths = depths.expand(len(layer.rope.axes.sections), *depths.shape)
    return given._replace(positions=depths)


def _depths(mask: MaskFunction, x: Tensor, given: Inputs) -> Tensor:
    """Return the depths of x's tokens, ``[b, s]`` or ``[t]``; with context parallelism, of this rank's."""
    depths, tokens, cu_seqlens = mask.tensors[mask.tree.positions], _own_tokens(x, given), given.cu_seqlens
    if cu_seqlens is None:
        ranks = 1 if given.context_parallel is None else given.context_parallel.mesh.size()
        mask.check({"b": x.shape[0]}, {"T": x.shape[-2] * ranks})
        return depths[..., tokens]
    mask.check({"b": len(cu_seqlens) - 1})
    last = depths.shape[-1] - 1
    if depths.dim() == 1:
        return depths[tokens.clamp(max=last)]  # the attention call refuses a tree of fewer tokens
    sequence = sequence_of(tokens, cu_seqlens)
    inside = (tokens - cu_seqlens[sequence]).clamp(max=last)
    return depths[sequence.clamp(max=len(depths) - 1), inside]


def angles_of(rope: Rope | None, x: Tensor, given: Inputs) -> Angles | None:
    """Return the rotary angles of x's tokens; None without rope.

    Angles in ``given`` are used as they are. Without positions, the tokens of each sequence are counted from
    0, or from the sequence's current length in a cache. With context parallelism, tokens are counted over all
    ranks. A rope of several axes has the same positions on all of them.

    Raises:
        ValueError: a length-dependent rope is used in a cache or with explicit positions, a rope of several
            axes in a cache without positions, or Angles come without a rope or with another pairing or width.
    """
    positions, angles = given.positions, given.angles
    if rope is None:
        if angles is not None:
            raise ValueError(
                f"angles: expected None for a layer with rope=None, got {angles.convention}; leave them out, "
                "or give the layer a rope"
            )
        return None
    if angles is not None:
        if (angles.interleaved, 2 * angles.cos.shape[-1]) != (rope.interleaved, rope.dim):
            raise ValueError(f"angles: expected Angles of {rope}, got {angles.convention}")
        return angles
    if rope.needs_length:
        return _angles_of_length(rope, x, given)
    return rope.angles(_natural_positions(rope, x, given) if positions is None else positions)


def _angles_of_length(rope: Rope, x: Tensor, given: Inputs) -> Angles:
    """Return the angles of a rope that depends on the sequence length, known only for dense inputs."""
    rule = type(rope.scaling).__name__
    if given.is_stored:
        raise ValueError(
            f"rope: {rule} rotates stored keys anew as the sequence grows; use another scaling with a cache, "
            "or pass angles=rope.angles(kv.positions, length=n) with one n for all steps"
        )
    if given.positions is not None or given.cu_seqlens is not None:
        raise ValueError(f"positions: {rule} needs a length; pass angles=rope.angles(positions, length=...)")
    ranks = 1 if given.context_parallel is None else given.context_parallel.mesh.size()
    return rope.angles(_natural_positions(rope, x, given), length=x.shape[1] * ranks)


def positions_of(
    rope: Rope | None, x: Tensor, given: Inputs, needs: str = "the layer's temperature"
) -> Tensor:
    """Return the integer positions of x's tokens, counted as in :func:`angles_of`; of several axes, axis 0.

    Raises:
        ValueError: only Angles were given, from which positions cannot be read.
    """
    if given.angles is not None and given.positions is None:
        raise ValueError(f"positions: {needs} needs them; pass positions= with angles=")
    positions = _natural_positions(rope, x, given) if given.positions is None else given.positions
    return positions if rope is None or rope.axes is None else positions[0]


def _natural_positions(rope: Rope | None, x: Tensor, given: Inputs) -> Tensor:
    tokens = _counted_tokens(x, given)
    if rope is None or rope.axes is None:
        return tokens
    n = len(rope.axes.sections)
    if given.is_stored:
        shape = ", ".join(map(str, (f"axes={n}", *tokens.shape)))
        raise ValueError(
            f"positions: expected [{shape}] in a cache step, got None: an image takes fewer positions than "
            "tokens, so a cache cannot count them; pass those of the new tokens, as attnlib.mrope_positions "
            f"counts them, or for text kv.positions.expand({n}, *kv.positions.shape)"
        )
    return tokens.expand(n, *tokens.shape)


def _counted_tokens(x: Tensor, given: Inputs) -> Tensor:
    if given.kv is not None:
        return given.kv.positions
    if isinstance(given.keys, KVView):
        if given.keys.positions is None:
            raise ValueError("positions: a view outside a cache step does not know them; pass positions=")
        return given.keys.positions
    tokens = _own_tokens(x, given)
    if given.cu_seqlens is None:
        return tokens
    return tokens - given.cu_seqlens[sequence_of(tokens, given.cu_seqlens)]


def _own_tokens(x: Tensor, given: Inputs) -> Tensor:
    """Return the index of each token of x in its row or pack, counted over all ranks."""
    count, ranks = x.shape[-2], given.context_parallel
    return torch.arange(count, device=x.device) if ranks is None else ranks.positions(count, x.device)


def sequence_of(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence index of each packed token; tokens past the last offset get the next index."""
    return torch.bucketize(tokens, cu_seqlens[1:], right=True)


def scale_and_gain(scale: float | None, rope: Rope | None, head_dim: int) -> tuple[float, float]:
    """Return the scale of scores, and the factor of q's rotated channels.

    YaRN multiplies the rotated channels of q and of k by its amplitude. If a rope rotates whole heads, both
    factors go into the scale; otherwise they go into the rotated channels of q.
    """
    gain = 1.0 if rope is None else rope.amplitude**2
    scale = head_dim**-0.5 if scale is None else float(scale)
    return (scale * gain, 1.0) if rope is not None and rope.dim == head_dim else (scale, gain)


def scaled_head(q: Tensor, rotated: int, gain: float) -> Tensor:
    """Multiply the first ``rotated`` channels of q by ``gain``, as YaRN requires for a partial rope."""
    return q if gain == 1 else torch.cat((q[..., :rotated] * gain, q[..., rotated:]), -1)
