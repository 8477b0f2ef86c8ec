"""Which loops of a kernel multiply, what a trip through one runs, and what the check holds against it."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from compiled import loops
from compiled.builds import TRAINED, Build, hopper_entries
from compiled.cached_builds import cached_calls, cached_entries, cached_product
from compiled.chipless import distinct
from compiled.launches import prepared
from compiled.loops import EXPECTED, SPILLING, Loop, Trip, disorder, faults, trips
from compiled.page import shortfall

from tests.compiled.test_compiled import BINARY, BUILD

GOOD = Trip(products=4, waits=(1, 0), exponentials=3, late=0, spills=0)
TWO_PRODUCTS = Loop(products=4, waits=(1, 0))
# A consumer's loop as ptxas leaves it: who must wait for a tile does so behind the kernel; a branch masks.
LOOP = (
    ".L_x_1:",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R5",
    "@!P0 BRA `(.L_x_7)",
    ".L_x_2:",
    "HGMMA.64x64x16.F32.BF16 R88, R148, gdesc[UR8].tnspB, R88",
    "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    "@!P1 BRA `(.L_x_3)",
    "LDL R5, [R1]",
    "FSEL R24, R24, -INF, P2",
    "STL [R1+0x4], R5",
    ".L_x_3:",
    "MUFU.EX2 R24, R24",
    "@!P3 MUFU.EX2 R25, R25",
    "MUFU.EX2 R26, R26",
    "FADD R27, R24, R25",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "@P4 BRA `(.L_x_1)",
)
BEHIND = (
    "EXIT",
    ".L_x_7:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R5",
    "@!P0 BRA `(.L_x_7)",
    "BRA `(.L_x_2)",
)


def text(lines: Sequence[str], start: int = 0) -> str:
    """Lines as nvdisasm writes them."""
    return "".join(
        f"{line}\n" if line.startswith(".L") else f"        /*{16 * n:04x}*/                   {line} ;\n"
        for n, line in enumerate(lines, start)
    )


def kernel(*loop: str) -> str:
    return text(("LDL R2, [R1]", *loop, "STL [R1], R2", *BEHIND))


def moved(line: str, after: str) -> tuple[str, ...]:
    """The loop with one line elsewhere."""
    rest = [x for x in LOOP if x != line]
    at = rest.index(after) + 1
    return (*rest[:at], line, *rest[at:])


def without(*lines: str) -> tuple[str, ...]:
    return tuple(x for x in LOOP if x not in lines)


SERIAL = tuple(
    x for line in LOOP for x in (line, "WARPGROUP.DEPBAR.LE gsb0, 0x0")[: 1 + line.startswith("HGMMA")]
)
LAST_WAIT, FIRST_PRODUCT = LOOP[-2], LOOP[1]


def test_the_trip_of_a_loop():
    """The masked branch is no part of it, nor is what lies around the loop; a wait behind the kernel is no
    loop.
    """
    assert trips(kernel(*LOOP)) == [GOOD]
    assert faults(GOOD, TWO_PRODUCTS) == []


def test_a_loop_in_a_loop_counts_alone():
    tiles = (".L_x_0:", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0", *LOOP, "@P5 BRA `(.L_x_0)")
    assert trips(kernel(*tiles)) == [GOOD]


def test_the_shorter_arm_of_a_branch_runs():
    arms = (
        *LOOP[:9],
        "@!P1 BRA `(.L_x_4)",
        *LOOP[10:13],
        "BRA `(.L_x_3)",
        ".L_x_4:",
        "FADD R1, R1, R1",
        *LOOP[13:],
    )
    assert trips(kernel(*arms)) == [GOOD]
    longer = (*arms[:15], *(("NOP",) * 9), *arms[15:])
    assert trips(kernel(*longer)) == [GOOD._replace(spills=2)]


def test_loops_without_products_do_not_count():
    assert trips(kernel(*without(*(x for x in LOOP if x.startswith("HGMMA"))))) == []
    assert trips(kernel(*LOOP[:-1])) == []


@pytest.mark.parametrize(
    ("loop", "trip", "why"),
    [
        (moved(LAST_WAIT, LOOP[8]), {"late": 3}, "3 of 3 exponentials come after the wait for the product"),
        (moved(LAST_WAIT, LOOP[15]), {"late": 1}, "1 of 3 exponentials come after the wait"),
        ((*LOOP[:14], "LDL.LU R3, [R1+0x8]", *LOOP[14:]), {"spills": 1}, "the stack 1 times; expected 0"),
        ((*LOOP[:-1], "@P3 STL [R1+0x8], R3", LOOP[-1]), {"spills": 1}, "the stack 1 times; expected 0"),
        ((LOOP[0], FIRST_PRODUCT, *LOOP[1:]), {"products": 5}, "has 5 matrix instructions; expected 4"),
        (without(FIRST_PRODUCT), {"products": 3}, "has 3 matrix instructions; expected 4"),
        (
            SERIAL,
            {"waits": (0, 0, 0, 0, 1, 0)},
            "until (0, 0, 0, 0, 1, 0) groups of products run; expected (1, 0)",
        ),
        (without(LOOP[8]), {"waits": (0,)}, "until (0,) groups of products run; expected (1, 0)"),
        (without(*(x for x in LOOP if "EX2" in x)), {"exponentials": 0}, "has no exponentials"),
    ],
    ids=[
        "wait first",
        "wait early",
        "read",
        "write",
        "a product more",
        "a product less",
        "serial",
        "one wait",
        "no exp",
    ],
)
def test_a_planted_defect_is_found(loop, trip, why):
    [found] = trips(kernel(*loop))
    assert found == GOOD._replace(**trip)
    [fault] = faults(found, TWO_PRODUCTS)
    assert why in fault


def test_a_wait_that_leaves_a_product_running_ends_none():
    swapped = [{LAST_WAIT: LOOP[8], LOOP[8]: LAST_WAIT}.get(x, x) for x in LOOP]
    assert trips(kernel(*swapped)) == [GOOD._replace(waits=(0, 1), late=3)]


def test_a_loop_may_have_no_softmax():
    [found] = trips(kernel(*without(*(x for x in LOOP if "EX2" in x))))
    assert faults(found, TWO_PRODUCTS._replace(softmax=False)) == []


def test_spills_that_are_known_are_allowed_and_no_more():
    assert faults(GOOD._replace(spills=2), TWO_PRODUCTS, spills=2) == []
    assert faults(GOOD._replace(spills=3), TWO_PRODUCTS, spills=2)


def launch(
    name: str = "forward", module: str = "attnlib.backends._triton.kernels.hopper.forward"
) -> SimpleNamespace:
    constants = {"D_MAIN": 16, "D_TAIL": 16, "E_TAIL": 0, "BLOCK_N": 32, "CONSUMERS": 2}
    kernel = SimpleNamespace(__name__=name, __module__=module)
    return SimpleNamespace(kernel=kernel, arguments=constants, blocks={})


def numbered(n: int, loop: Sequence[str]) -> str:
    return kernel(*loop).replace(".L_x_", f".L_x_{n}")


def test_the_loops_of_a_kernel():
    both = numbered(1, LOOP) + numbered(2, LOOP)
    assert disorder("one", launch(), both) == []
    assert disorder("one", launch(), numbered(1, LOOP)) == ["has 1 loops with products; expected 2"]
    late = numbered(1, moved(LAST_WAIT, LOOP[8])) + numbered(2, LOOP)
    assert disorder("one", launch(), late) == [
        "3 of 3 exponentials come after the wait for the product (1 of 2 loops)"
    ]
    assert disorder("one", launch(module="attnlib.backends._triton.kernels.forward"), late) == []
    [unknown] = disorder("one", launch("new"), both)
    assert unknown == f"has loops that nothing is expected of, {[GOOD, GOOD]}; EXPECTED has no new"


def test_loops_may_come_in_any_order(monkeypatch):
    monkeypatch.setattr(
        loops, "EXPECTED", {"forward": lambda _: (TWO_PRODUCTS, TWO_PRODUCTS._replace(products=5))}
    )
    longer = (LOOP[0], FIRST_PRODUCT, *LOOP[1:])
    assert disorder("one", launch(), numbered(1, LOOP) + numbered(2, longer)) == []
    assert disorder("one", launch(), numbered(1, longer) + numbered(2, LOOP)) == []
    late = moved(LAST_WAIT, LOOP[8])
    [fault] = disorder("one", launch(), numbered(1, longer) + numbered(2, late))
    assert fault == "3 of 3 exponentials come after the wait for the product (1 of 2 loops)"


def test_what_is_in_disorder_is_amiss():
    assert shortfall(BUILD, BINARY._replace(disorder=("a", "b"))) == "a; b"


def test_every_kernel_of_hopper_has_expectations():
    pytest.importorskip("triton")
    builds = distinct((*hopper_entries(), *cached_entries()))
    kernels = {prepared(build)[0].kernel for build in builds}
    assert {kernel.__name__ for kernel in kernels if ".hopper." in kernel.__module__} == EXPECTED.keys()
    compiled = {str(build) for build in (*builds, *cached_calls(), *cached_product())}
    assert {name for spilling in SPILLING.values() for name in spilling} <= compiled
    plain = {
        str(Build("forward", 90, head, mask=mask, hopper=True))
        for head in TRAINED
        for mask in ("causal", "full")
    }
    assert plain <= {str(build) for build in builds}
    for spilling in SPILLING.values():
        assert not plain & spilling.keys()  # what the benchmark shows


def test_expectations_of_the_forward():
    """Two products of 16 channels, or keys, an instruction: 128 channels are 8 of each for 128 keys."""
    constants = {"D_MAIN": 128, "D_TAIL": 0, "E_TAIL": 0, "BLOCK_N": 128, "CONSUMERS": 2}
    assert EXPECTED["forward"](constants) == (Loop(16, (1, 0)),) * 2
    assert EXPECTED["forward"](constants | {"D_TAIL": 64})[0].products == 20
    assert (
        EXPECTED["forward"](constants | {"D_MAIN": 256, "BLOCK_N": 64, "CONSUMERS": 3})
        == (Loop(20, (1, 0)),) * 3
    )
