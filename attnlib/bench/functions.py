"""Time mask and score functions beside FlexAttention, on its default kernels and on FlashAttention-4's."""

from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import CAUSAL, MaskFunction, attention, mask_mod, score_mod
from .compare import Cells, agreeing, attempt
from .peers import versions
from .place import Target
from .report import Table
from .speed import Rows, Run, milliseconds, timed_passes

NEAR, DOCUMENTS, BOUND = 1024, 12, 30.0
FARTHEST = 128  # each distance up to this one has its own bias; all farther keys share one
FLASH = MappingProxyType({"BACKEND": "FLASH"})
Arrays = tuple[Tensor, ...]


class FunctionCase(NamedTuple):
    """A call with a mask function or a score function, written so that both libraries accept it.

    ``function`` gets the tensors that ``tensors(case, device)`` returns after its indices. Score functions
    get a causal mask.
    """

    name: str
    function: Callable[..., Tensor]
    is_mask: bool
    tensors: Callable[["FunctionCase", str], Arrays] = lambda case, device: ()
    dim: int = 128
    batch: int = 2
    heads: int = 16
    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16


def same_document(b, h, i, j, documents):
    """Show the keys of the query's document up to the query."""
    return (j <= i) & (documents[b, i] == documents[b, j])


def near(b, h, i, j):
    """Show the last keys up to the query, as a window does."""
    return (j <= i) & (i - j < NEAR)


def behind_prefix(b, h, i, j):
    """Show the keys up to the query, and all keys of the prefix."""
    return (j <= i) | (j < NEAR)


def alibi(score, b, h, i, j, slopes):
    """Subtract ALiBi's bias."""
    return score - slopes[h] * (i - j)


def capped(score, b, h, i, j):
    """Bound the score by tanh, as a softcap does."""
    return BOUND * torch.tanh(score / BOUND)


def by_distance(score, b, h, i, j, bias):
    """Add a bias that depends on the head and the distance."""
    return score + bias[h, (i - j).clamp(-FARTHEST, FARTHEST) + FARTHEST]


def capped_by_distance(score, b, h, i, j, bias):
    """Add a bias by distance, and bound the sum by tanh."""
    return BOUND * torch.tanh(by_distance(score, b, h, i, j, bias) / BOUND)


def documents(case: FunctionCase, device: str) -> Arrays:
    """Return the document of each token: int32 ``[b, t]``; documents have random lengths."""
    ends = torch.randperm(case.tokens - 1, device=device)[: DOCUMENTS - 1].sort().values + 1
    numbers = torch.searchsorted(ends, torch.arange(case.tokens, device=device), right=True)
    return (numbers.int().expand(case.batch, -1).contiguous(),)


def slopes(case: FunctionCase, device: str) -> Arrays:
    """Return ALiBi slopes ``[h]``."""
    return (0.1 * torch.rand(case.heads, device=device),)


def biases(case: FunctionCase, device: str) -> Arrays:
    """Return a bias for each head and distance: ``[h, n]``."""
    return (torch.randn(case.heads, 2 * FARTHEST + 1, device=device),)


FUNCTIONS = tuple(
    case._replace(name=f"{case.name}, d{dim}", dim=dim)
    for dim in (64, 128)
    for case in (
        FunctionCase(f"{DOCUMENTS} documents", same_document, True, documents),
        FunctionCase(f"window of {NEAR}", near, True),
        FunctionCase(f"prefix of {NEAR}", behind_prefix, True),
        FunctionCase("ALiBi", alibi, False, slopes),
        FunctionCase("tanh", capped, False),
        FunctionCase("distance bias", by_distance, False, biases),
        FunctionCase("tanh of a distance bias", capped_by_distance, False, biases),
    )
)


def rows(place: Target, tables: Iterable[Table], work: Iterable[FunctionCase] = FUNCTIONS) -> Rows:
    """Yield the milliseconds of each call's forward and backward; masks are classified before the timing."""
    return milliseconds(place, tables, work, timed)


def timed(place: Target, case: FunctionCase) -> dict[str, Cells]:
    """Return the seconds of each implementation in each pass, if its results agree with the others'."""
    torch.manual_seed(0)
    torch.compiler.reset()  # torch.compile stops compiling a function anew after a few masks
    shape = (case.batch, case.tokens, case.heads, case.dim)
    given = [torch.randn(shape, device=place.device, dtype=case.dtype) for _ in range(4)]
    captured = case.tensors(case, place.device)
    makers = {"ours": ours, "Flex": flex}
    if "FA4" in versions():
        makers["Flex FLASH"] = partial(flex, **FLASH)
    made = {name: attempt(make, place, case, captured, given) for name, make in makers.items()}
    runs = agreeing(made, Run.results, ("ours",))
    return timed_passes(place, runs)


def ours(place: Target, case: FunctionCase, captured: Arrays, given: list[Tensor]) -> Run:
    """Return attnlib's attention with the function."""
    options = {"mask": CAUSAL, "backend": place.backend}
    if case.is_mask:
        mask = mask_mod(case.function, *captured)
        if isinstance(mask, MaskFunction):
            size = (case.batch, case.heads, case.tokens, case.tokens)
            mask = mask.block_mask(*size, device=torch.device(place.device))
        options["mask"] = mask
    else:
        options["score"] = score_mod(case.function, *captured)
    *leaves, dout = (x.clone() for x in given)
    return Run(partial(attention, **options), tuple(x.requires_grad_() for x in leaves), dout, False)


def flex(place: Target, case: FunctionCase, captured: Arrays, given: list[Tensor], **options: object) -> Run:
    """Return FlexAttention with the function, on the kernels that ``options`` select."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(b, h, i, j):
        return case.function(b, h, i, j, *captured) if case.is_mask else j <= i

    def score(s, b, h, i, j):
        return case.function(s, b, h, i, j, *captured)

    size = (case.batch if case.is_mask else None, None, case.tokens, case.tokens)
    blocks = {"BLOCK_SIZE": (128, 128)} if options else {}
    block_mask = create_block_mask(mask, *size, device=place.device, **blocks)
    attend = partial(torch.compile(flex_attention, dynamic=False), kernel_options=options or None)
    *leaves, dout = (x.transpose(1, 2).contiguous() for x in given)
    call = partial(attend, score_mod=None if case.is_mask else score, block_mask=block_mask)
    return Run(call, tuple(x.requires_grad_() for x in leaves), dout, True)
