"""Convert padded batches to packed sequences and back, like flash-attn's ``bert_padding``."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...internal.signatures import kind


@kind
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of ``hidden_states`` ``[b, s, ...]`` that ``attention_mask`` ``[b, s]`` marks.

    Returns a tuple:

    - the tokens ``[t, ...]``
    - their indices in the flattened batch ``[b * s]``
    - ``cu_seqlens``, int32 ``[b + 1]``
    - the length of the longest sequence
    - the number of used tokens in each sequence, int32 ``[b]``

    Tokens that ``unused_mask`` marks are packed, too, but do not count as used.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = kept.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


@kind
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo ``unpad_input``: return ``[b, s, ...]`` from tokens ``[t, ...]`` at ``indices``, padded with 0."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


@kind
def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Select rows of a tensor along its first dimension."""
    return x[indices]
