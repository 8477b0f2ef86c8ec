"""Positions of text, images and videos on three axes (M-RoPE), as Qwen2-VL counts them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..internal.checks import bind, is_recorded, is_strided, refuse_tensor
from ..internal.signatures import kind

OFFSETS = (torch.int32, torch.int64)


@kind
def mrope_positions(
    token_types: Tensor,
    grids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_intervals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the positions ``[3, b, s]`` of tokens in time, row and column, and those after each sequence.

    This is multimodal rope (M-RoPE; Wang et al., 2024, Qwen2-VL, arXiv 2409.12191). A text token has equal
    positions on all axes, one more than the text token before it. The tokens of an image or video have the
    position where it begins plus their own time step, row and column; it advances the positions of the tokens
    after it by the larger of its height and width. Padding gets position 0. The result is int64.

    The second result, int64 ``[b]``, is one more than the greatest position of each sequence. The first token
    that is decoded has this position on all axes, and each further token one more.

    Args:
        token_types: ``[b, s]``, or packed ``[t]`` with ``cu_seqlens``: 0 or False for text, any other value
            for a token of an image or video (``mm_token_type_ids`` of transformers' processors).
        grids: ints ``[n, 3]``, time, height and width of all images and videos, in the order of their tokens.
            They count tokens: divide the height and width in ``image_grid_thw`` by the vision encoder's
            ``spatial_merge_size``.
        attention_mask: ``[b, s]``, nonzero for tokens, 0 for padding.
        cu_seqlens: the offsets of packed sequences, ints ``[b + 1]``. Positions are then ``[3, t]``.
        time_intervals: positions per time step, floats ``[n]``, as in Qwen2.5-VL: 1 for an image, and
            ``tokens_per_second * second_per_grid`` for a video. Products are rounded down. None means 1.

    The host reads offsets and grids from the device to check them, except under torch.compile and in a CUDA
    graph.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: a shape does not fit, or the grids are not those of the tokens.

    >>> token_types = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0]])  # an image of 2 x 3
    >>> positions, following = mrope_positions(token_types, torch.tensor([[1, 2, 3]]))
    >>> positions[:, 0]
    tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5],
            [0, 1, 2, 2, 2, 3, 3, 3, 5],
            [0, 1, 2, 3, 4, 2, 3, 4, 5]])
    >>> following
    tensor([6])
    """
    _check_tensors(token_types, grids, attention_mask, cu_seqlens, time_intervals)
    tokens = torch.arange(token_types.numel(), device=token_types.device)
    if cu_seqlens is None:
        b, s = token_types.shape
        cu_seqlens = torch.arange(b + 1, device=tokens.device) * s
    sequence = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    there = torch.ones_like(token_types) if attention_mask is None else attention_mask
    there = (there != 0).flatten() & (tokens < cu_seqlens[-1])
    visual = (token_types != 0).flatten() & there
    sizes = grids.long().prod(-1)
    ends, number = sizes.cumsum(0), visual.cumsum(0) - 1  # tokens of images and videos are numbered
    grid = torch.bucketize(number, ends, right=True)  # of text, this is any of 0 to n, and is not used
    index = number - pad(ends, (1, 0))[grid]
    if not (is_recorded(visual) or visual.is_meta):
        _check_grids(grids, visual, index, torch.stack((sequence, (there & ~visual).cumsum(0))))
    _, height, width = pad(grids.long(), (0, 0, 0, 1), value=1)[grid].unbind(-1)
    is_last = index + 1 == pad(sizes, (0, 1))[grid]
    steps = torch.where(visual, is_last * torch.maximum(height, width), there.long())
    before = pad(steps.cumsum(0), (1, 0))
    start = before[:-1] - before[cu_seqlens][sequence]
    time = index // (height * width)
    if time_intervals is not None:
        time = (time * pad(time_intervals.float(), (0, 1))[grid]).long()
    inside = torch.stack((time, index // width % height, index % width))
    positions = (start + torch.where(visual, inside, 0)) * there
    following = sequence.new_zeros(len(cu_seqlens))  # the last one is for tokens of no sequence
    following = following.scatter_reduce(0, sequence, positions.amax(0) + there, "amax")[:-1]
    return positions.unflatten(1, token_types.shape), following


def _check_tensors(
    token_types: Tensor,
    grids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    time_intervals: Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless the arguments of :func:`mrope_positions` fit each other."""
    if cu_seqlens is not None and attention_mask is not None:
        raise ValueError("attention_mask: expected None with cu_seqlens=; packed sequences have no padding")
    of_tokens = "bs" if cu_seqlens is None else "t"
    given = [("token_types", token_types, of_tokens), ("grids", grids, "na")]
    for name, x, dims in (
        ("attention_mask", attention_mask, of_tokens),
        ("cu_seqlens", cu_seqlens, "o"),
        ("time_intervals", time_intervals, "n"),
    ):
        given += [] if x is None else [(name, x, dims)]
    for name, x, _ in given:
        if not is_strided(x):
            refuse_tensor(name, x)
        is_time, is_float = name == "time_intervals", x.is_floating_point()
        if x.is_complex() or (is_float and not is_time) or (name == "cu_seqlens" and x.dtype not in OFFSETS):
            raise TypeError(f"{name}: expected {'real numbers' if is_time else 'ints'}, got {x.dtype}")
        if x.device != token_types.device:
            raise ValueError(f"{name}: expected device {token_types.device} like token_types, got {x.device}")
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ValueError(f"grids: expected [n, 3], time, height and width, got {tuple(grids.shape)}")
    bind(*given)
    if cu_seqlens is None or is_recorded(cu_seqlens) or cu_seqlens.is_meta:
        return
    offsets, tokens = cu_seqlens.tolist(), len(token_types)
    if offsets[:1] != [0] or offsets != sorted(offsets) or offsets[-1] > tokens:
        raise ValueError(f"cu_seqlens: expected offsets from 0 that grow to {tokens} at most, got {offsets}")


def _check_grids(grids: Tensor, visual: Tensor, index: Tensor, groups: Tensor) -> None:
    """Raise ValueError unless the tokens of each grid are side by side: in one column of ``groups``."""
    if (grids < 1).any():
        raise ValueError(f"grids: expected at least 1 in each dimension, got {int(grids.min())}")
    tokens, size = int(visual.sum()), int(grids.long().prod(-1).sum())
    if tokens != size:
        raise ValueError(
            f"grids: expected the {tokens} tokens that token_types says are of images and videos, got grids "
            f"of {size}; divide the height and width by the vision encoder's spatial_merge_size"
        )
    groups, index = groups[:, visual], index[visual]
    if (groups.diff().any(0) & (index[1:] > 0)).any():
        raise ValueError(
            "token_types: expected the tokens of each image and video side by side in one sequence, got "
            "others between them; give grids in the order of their tokens"
        )
