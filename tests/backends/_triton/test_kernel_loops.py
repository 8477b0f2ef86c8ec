"""What loops of kernels may not do, which the interpreter never shows, and a result only at times."""

import ast

import pytest
from source import KERNELS, PACKAGE, Source


def values(x: ast.AST) -> set[str]:
    """Names and attributes of an expression, but for constants, which are in capitals and never 0."""
    if isinstance(x, ast.Name | ast.Attribute):
        spelled = ast.unparse(x)
        return set() if spelled.rpartition(".")[2].isupper() else {spelled}
    return set().union(*map(values, ast.iter_child_nodes(x)))


def divisions_by_counts(source: Source) -> list[str]:
    """Where a loop divides by what its range is made of, which is 0 if the loop has no step.

    Triton issues the loads of first steps ahead of a loop, each on condition that there is such a step.
    Addresses are divided ahead too, and LLVM takes no divisor to be 0. It drops the condition, and the loads
    of a loop without a step land in the tiles of the next.
    """
    found = []
    for loop in ast.walk(source.tree):
        if isinstance(loop, ast.For):
            counts = values(loop.iter)
            divided = [
                x
                for x in ast.walk(loop)
                if isinstance(x, ast.BinOp) and isinstance(x.op, ast.FloorDiv | ast.Mod)
            ]
            found += [
                f"{source.path}:{x.lineno}: {ast.unparse(x)}" for x in divided if values(x.right) & counts
            ]
    return found


@pytest.mark.parametrize("source", [x for x in PACKAGE if x.path.startswith(KERNELS)], ids=lambda x: x.path)
def test_no_loop_divides_by_what_it_counts(source):
    found = divisions_by_counts(source)
    assert not found, f"divide by 1 at least, as backward_keys does: {found}"


def planted(body: str) -> Source:
    return Source(
        "x.py",
        "def f(count, x, GROUP):\n    for n in tl.range(0, GROUP * count, num_stages=x.STAGES):\n        "
        f"{body}",
    )


@pytest.mark.parametrize(
    "body", ["n // count", "n % count", "f(n // (count + 0))", "y = 1 // count if GROUP else 0"]
)
def test_a_planted_division_is_found(body):
    assert len(divisions_by_counts(planted(body))) == 1


@pytest.mark.parametrize("body", ["n // GROUP", "n % x.STAGES", "count // 2", "n // at_least_one"])
def test_other_divisions_are_none(body):
    assert not divisions_by_counts(planted(body))
