"""Programs of indices as device functions, against the functions themselves on torch's tensors."""

import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import DEVICE, INTERPRETED
from program_cases import FLOATS, MASKS, SCORES, Case, Tile, program_of
from program_kernels import of_mask, of_score
from torch import Tensor

from attnlib.backends._triton.functions.programs import (
    derivative_of,
    function_of,
    gradients_of,
    learned,
    tables,
)
from attnlib.backends._triton.functions.ranges import Bounds
from attnlib.tracing.program import Program
from attnlib.tracing.trace import QUERY_OFFSET

ROOT = Path(__file__).parents[2]
OLDER = ROOT / "out/triton-3.6.0"
TILE = Tile()
FORMS = {"rows": (False, 1), "columns": (True, 1), "rows of two heads": (False, 2)}
SHAPE = len(TILE.i), len(TILE.j)
PLACE = (TILE.b, TILE.h, TILE.i.start, TILE.j.start, TILE.first)


def moved(arguments: list) -> list[Tensor]:
    """The tensors among a function's arguments, where kernels find them."""
    return [x.to(DEVICE) for x in arguments if x is not QUERY_OFFSET]


def tile_of(form: str) -> Tile:
    return TILE._replace(group=FORMS[form][1])


def mask_by_kernel(program: Program, arguments: list, form: str = "rows") -> Tensor:
    seen = torch.full(SHAPE, 7, dtype=torch.int8, device=DEVICE)
    of_mask[(1,)](
        seen, tables(moved(arguments)), *PLACE, function_of(program, Bounds()), *SHAPE, *FORMS[form]
    )
    return seen.cpu()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, form):
    case = MASKS[name]
    arguments = case.arguments()
    seen = mask_by_kernel(program_of("mask", case, arguments), arguments, form)
    assert torch.equal(seen, tile_of(form).called(case, arguments).to(torch.int8))


def divided_by(n):
    """Quotients and rests by what is read, and by a constant."""
    return {
        "ints": lambda b, h, i, j, s, t: i // t[0] > j % t[0],
        "floats": lambda b, h, i, j, s, t: i / 2 // s > j / 2 % s,
        "a constant": lambda b, h, i, j, s, t: i // n > j % n,
    }


@pytest.mark.parametrize("name", divided_by(0))
def test_a_divisor_of_0_counts_as_1(name):
    case, ones = Case(divided_by(0)[name]), Case(divided_by(1)[name])
    arguments = [torch.tensor(0.0), torch.zeros(1, dtype=torch.int32)]
    expected = TILE.called(ones, [x + 1 for x in arguments])
    assert torch.equal(
        mask_by_kernel(program_of("mask", case, arguments), arguments), expected.to(torch.int8)
    )


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=9),
    st.sampled_from([*range(-9, 0), *range(1, 10), 16, 2**30]),
)
def test_division_rounds_down(numbers, divisor):
    """By constants and by what is read, of ints and of floats."""
    t, s = torch.tensor(numbers, dtype=torch.int64), torch.tensor(divisor)
    for half in (False, True):
        for known in (False, True):

            def rounded(b, h, i, j, s, t, half=half, known=known):
                x, y = t[j] / 2 if half else t[j], divisor if known else s * 1.0 if half else s
                return x // y * 8 + x % y >= i

            case = Case(rounded)
            expected = TILE.called(case, [s, t]).to(torch.int8)
            assert torch.equal(mask_by_kernel(program_of("mask", case, [s, t]), [s, t]), expected), (
                half,
                known,
            )


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WITH_CONSTANTS = {"%": operator.mod, "//": operator.floordiv, "<<": operator.lshift, ">>": operator.rshift}


def near_the_limits(dtype: torch.dtype) -> list[int]:
    """Constants at and beyond the limits of a dtype, and odd ones that fp64 rounds to powers of two."""
    bits, most = torch.iinfo(dtype).bits, torch.iinfo(dtype).max
    known = {bits - 1, bits, bits + 1, most, most + 1, most + 2, 2**bits, 2**bits + 1, 2**bits + 2}
    known |= {2**53 + 1, 2**54 - 1, 2**60 + 1, 2**62, 2**63 - 1}
    return sorted(sign * x for x in known for sign in (1, -1) if -(2**63) <= sign * x < 2**63)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("sign", WITH_CONSTANTS)
def test_constants_wrap_around_as_torchs_do(sign, dtype):
    """They are brought to the dtype of the number beside them before they divide or shift it (F8)."""
    done, known = WITH_CONSTANTS[sign], torch.iinfo(dtype)
    every = torch.tensor([known.min, known.min + 1, known.max - 1, known.max, 0, 1, 3, 77], dtype=dtype)
    for n in near_the_limits(dtype):
        rest = n % 2**known.bits
        if sign in ("%", "//") and rest == 0:  # which counts as 1, and raises in torch
            continue
        t = every[1:] if rest == 2**known.bits - 1 else every  # the least number has no quotient by -1
        arguments = [t, done(t, n)]
        case = Case(lambda b, h, i, j, t, expected, n=n: done(t[j], n) == expected[j])
        seen = mask_by_kernel(program_of("mask", case, arguments), arguments)
        assert seen.all(), (n, arguments[1].tolist())


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in cast"
)  # of NaN to an int, where nothing is seen
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_their_derivatives(name, form):
    case = SCORES[name]
    arguments = case.arguments()
    score, d = torch.randn(2, *SHAPE)
    seen = torch.rand(SHAPE) < 0.9
    found = by_kernel(program_of("score", case, arguments), arguments, score, d, seen, form)
    golden, naive = (
        by_torch(case, arguments, score, d, seen, form, dtype) for dtype in (torch.float64, torch.float32)
    )
    assert found.keys() == golden.keys()
    for part, x in found.items():
        assert_close(part, x, [naive[part]], golden[part], 2, 32 * torch.finfo(torch.float32).eps)


def by_kernel(program: Program, arguments: list, score: Tensor, d: Tensor, seen: Tensor, form: str) -> dict:
    """What becomes of scores, the derivative by them where they are seen, and those of what is read by its
    number.
    """
    tensors, broken = moved(arguments), torch.where(seen, torch.stack((score, d)), float("nan")).to(DEVICE)
    numbers = learned(program)
    grads = [torch.zeros(x.shape, device=DEVICE) if n in numbers else None for n, x in enumerate(tensors)]
    changed, by_score = torch.full((2, *SHAPE), float("nan"), device=DEVICE)
    of_score[(1,)](
        changed, by_score, *broken, seen.to(DEVICE), tables(tensors), tables(grads), *PLACE,
        *(make(program, Bounds()) for make in (function_of, derivative_of, gradients_of)), *SHAPE,
        *FORMS[form],
    )  # fmt: skip
    found = {"changed": changed, "by score": by_score, **{str(n): grads[n] for n in numbers}}
    return {part: x.cpu().masked_fill(~seen, 0) if x.shape == SHAPE else x.cpu() for part, x in found.items()}


def by_torch(
    case: Case, arguments: list, score: Tensor, d: Tensor, seen: Tensor, form: str, dtype: torch.dtype
) -> dict:
    """The same of the function, and of autograd, in another precision."""
    of_floats = [x is not QUERY_OFFSET and x.dtype in FLOATS for x in arguments]
    given = [
        x.to(dtype).requires_grad_() if known else x for x, known in zip(arguments, of_floats, strict=True)
    ]
    score, d = score.to(dtype).requires_grad_(), d.to(dtype).masked_fill(~seen, 0)
    changed = tile_of(form).called(case, given, score).to(dtype)
    leaves = {"by score": score}
    tensors = [x for x in given if x is not QUERY_OFFSET]
    leaves |= {str(n): tensors[n] for n in learned(program_of("score", case, arguments))}
    grads = (
        torch.autograd.grad(changed, list(leaves.values()), d, allow_unused=True, materialize_grads=True)
        if changed.requires_grad
        else [torch.zeros_like(x) for x in leaves.values()]
    )
    found = {"changed": changed.detach(), **dict(zip(leaves, grads, strict=True))}
    return {part: x.masked_fill(~seen, 0) if x.shape == SHAPE else x for part, x in found.items()}


def test_the_same_program_is_the_same_function():
    one, other = (program_of("mask", MASKS["documents"], MASKS["documents"].arguments()) for _ in range(2))
    assert one is not other
    assert function_of(one, Bounds()) is function_of(other, Bounds())
    assert function_of(one, Bounds()) is not function_of(program_of("mask", MASKS["causal"], []), Bounds())


@pytest.mark.skipif(not INTERPRETED, reason="one process for all that is compiled is enough")
@pytest.mark.parametrize("older", ["", OLDER], ids=["newest", "older"])
def test_they_are_compiled(older, tmp_path):
    """For a chip that need not be here, in a process without the interpreter."""
    if older and not older.exists():
        pytest.skip(f"no {OLDER}; make compile-check installs it")
    paths = [str(older)] * bool(older) + [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/helpers")]
    known = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    known |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", "from program_kernels import compiled; compiled()"]
    done = subprocess.run(command, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
