"""Time largest scores and probabilities beside the forward of the same call."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import CAUSAL, FULL, attention_maxima, attention_weights, attention_with_lse
from .cases import Case, plain
from .compare import Action, Cells, attempt, in_turns
from .place import Target
from .report import Line, Table
from .speed import Rows
from .watchdog import watched

WORK = (
    plain(8192, 16, 128)._replace(name="d128 causal 8k"),
    plain(8192, 16, 128, FULL)._replace(name="d128 full 8k"),
    Case("d128 causal 8k, GQA 32/8", 1, 32, 8, 8192, 128, 128, CAUSAL),
    plain(8192, 16, 64)._replace(name="d64 causal 8k"),
    plain(8192, 16, 256)._replace(name="d256 causal 8k"),
)
SAMPLE = 64  # queries, and keys, whose pairs are computed in plain torch to check results


def rows(place: Target, tables: Sequence[Table], work: Iterable[Case] = WORK) -> Rows:
    """Time the forward, and what is recomputed from its LSE; each is checked against plain torch first."""
    for case in work:
        with watched(f"{tables[0].name}, {case.name}"):
            cells = timed(place, case)
        place.tidy()
        yield tables[0], Line(case.name, {name: attempt(lambda x: x * 1e3, x) for name, x in cells.items()})


def timed(place: Target, case: Case) -> Cells:
    """Return the seconds of the forward, the maxima, the mass and the mass of a sample of queries."""
    q, k, v, _ = case.tensors(place.device)
    options = {"mask": case.mask, "backend": place.backend}
    _, lse = attention_with_lse(q, k, v, **options)
    picked = torch.arange(case.tokens - SAMPLE, case.tokens, device=place.device)
    calls = {
        "maxima": partial(attention_maxima, q, k, **options),
        "mass": partial(attention_weights, q, k, lse, over="queries", **options),
        f"mass of {SAMPLE} rows": partial(
            attention_weights, q, k, lse, over="queries", rows=picked, **options
        ),
    }
    forward: dict[str, Action] = {"forward": partial(attention_with_lse, q, k, v, **options)}
    expected = by_definition(case, q, k, lse, picked)
    checked = {name: attempt(_agreeing, call, *expected[name]) for name, call in calls.items()}
    return in_turns(forward | checked, place.seconds, place.rounds, place.budget)


def _agreeing(call: Callable[[], Tensor], picked: Tensor, expected: Tensor) -> Callable[[], Tensor]:
    """Return the call, if the picked columns of its result are the expected ones.

    Raises:
        AssertionError: they differ.
    """
    torch.testing.assert_close(call()[..., picked], expected, rtol=1e-2, atol=1e-2)
    return call


def by_definition(
    case: Case, q: Tensor, k: Tensor, lse: Tensor, picked: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the columns to compare, and their values from plain torch in fp32, for each call."""
    keys = torch.arange(0, case.tokens, max(1, case.tokens // SAMPLE), device=q.device)
    every = torch.arange(case.tokens, device=q.device)
    of_queries, of_keys = _scores(case, q, k, picked, every), _scores(case, q, k, every, keys)
    p = torch.exp(of_queries - lse[..., picked, None]).sum(-2)
    return {
        "maxima": (picked, of_queries.amax(-1)),
        "mass": (keys, torch.exp(of_keys - lse[..., None]).sum(-2)),
        f"mass of {SAMPLE} rows": (every, p),
    }


def _scores(case: Case, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> Tensor:
    k = k[:, j].repeat_interleave(case.heads // case.kv_heads, 2).float()
    scores = torch.einsum("bshd,bthd->bhst", q[:, i].float(), k) * case.dim**-0.5
    return scores.masked_fill(~case.mask.visible(i[:, None], j), -torch.inf)
