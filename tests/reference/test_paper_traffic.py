"""What the algorithms move, counted, against the formulas; and the formulas against the papers' claims."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_problems import BACKWARD, EXACT, FORWARD, heads, make

from attnlib import CAUSAL, FULL
from attnlib.reference import formulas, standard
from attnlib.reference.flash1 import tile_sizes
from attnlib.reference.formulas import ProblemSizes, TileVisits
from attnlib.reference.matmul import matmul
from attnlib.reference.traffic import SlowMemory, Traffic, tiles
from tests.core.test_memory import allocations

VISITING = {
    "flash1": (FORWARD["flash1"], formulas.flash1_forward),
    "flash2": (FORWARD["flash2"], formulas.flash2_forward),
    "flash1 backward": (BACKWARD["flash1"], formulas.flash1_backward),
    "flash2 backward, one pass": (BACKWARD["flash2, one pass"], formulas.flash2_backward_one_pass),
    "flash2 backward, two passes": (BACKWARD["flash2, two passes"], formulas.flash2_backward_two_pass),
}


def count(run, head) -> Traffic:
    memory = SlowMemory()
    run(head, memory)
    return memory.traffic


@pytest.mark.parametrize("name", VISITING)
@given(head=heads())
def test_flash_counts_equal_their_formula_under_any_mask(name, head):
    """To the element, for the tiles with a visible pair: hidden tiles are not read."""
    run, formula = VISITING[name]
    assert count(run, head) == formula(head.sizes, head.visits())


@pytest.mark.parametrize("name", VISITING)
@given(head=heads())
def test_no_mask_is_the_bound(name, head):
    run, formula = VISITING[name]
    full, ours = formula(head.sizes, TileVisits.full(head.sizes, head.rows, head.columns)), count(run, head)
    assert count(run, head.change(mask=FULL)) == full
    assert all(a <= b for a, b in zip(ours, full, strict=True))


@given(st.integers(1, 6), st.integers(1, 4))
def test_causal_square_tiles_visit_half(n, tile):
    head = make(n * tile, n * tile, 1, 1, mask=CAUSAL, rows=tile, columns=tile)
    assert TileVisits.causal(n * tile, tile) == head.visits()
    assert (
        TileVisits.full(head.sizes, tile, tile).keys == 2 * TileVisits.causal(n * tile, tile).keys - n * tile
    )


def test_a_tile_is_a_copy_that_only_assignment_writes_back():
    memory, x = SlowMemory(), torch.zeros(4, 3)
    (array,) = memory.inputs(x)
    tile = array[1:3]
    tile += 1
    assert memory.traffic == Traffic(read=6, written=0)
    assert not x.any()
    array[1:3] += tile
    assert memory.traffic == Traffic(read=12, written=6)
    assert x.sum() == 6
    memory.scratch(array, 2, 2)
    memory.output(array, 5, fill=1.0)
    assert memory.traffic == Traffic(read=12, written=11, extra=4)


@pytest.mark.parametrize("size", [0, -1])
def test_tiles_of_nothing_are_refused(size):
    with pytest.raises(ValueError, match=f"at least 1, got {size}"):
        tiles(4, size)


def test_causal_visits_need_tiles_that_divide_the_length():
    with pytest.raises(ValueError, match="divides length=10, got 4"):
        TileVisits.causal(10, 4)


@given(heads())
def test_standard_counts(head):
    memory = SlowMemory()
    standard.forward(*head.tensors, head.pairs, memory=memory)
    assert memory.traffic == formulas.standard_forward(head.sizes)
    assert count(BACKWARD["standard"], head) == formulas.standard_backward(head.sizes)


@given(heads())
def test_incremental_counts(head):
    """All queries are one tile."""
    head = head.change(rows=max(1, len(head.q)))
    assert count(FORWARD["incremental"], head) == formulas.incremental_forward(
        head.sizes, head.visits(), head.columns
    )


@given(*[st.integers(0, 9)] * 3, st.integers(1, 10))
def test_matmul_counts(s, m, t, tile):
    a, b, memory = (
        torch.randn(s, m, dtype=torch.float64),
        torch.randn(m, t, dtype=torch.float64),
        SlowMemory(),
    )
    torch.testing.assert_close(matmul(a, b, tile=tile, memory=memory), a @ b, **EXACT)
    assert memory.traffic == formulas.matmul(s, m, t, tile)


def test_matmul_one_and_two():
    """Dot product by dot product n x n matrices take 2 n**3 reads, kept on chip 2 n**2, in tiles 2 n**3 /
    tile.
    """
    n, x = 12, torch.randn(12, 12)
    for tile, reads in ((1, 2 * n**3), (n, 2 * n**2), (3, 2 * n**3 // 3)):
        memory = SlowMemory()
        matmul(x, x, tile=tile, memory=memory)
        assert memory.traffic == Traffic(read=reads, written=n * n)


# 100 KiB of half-precision numbers, the papers' typical fast memory, and heads of 64.
M, D = 51_200, 64


def flash1_moved(length: int, on_chip: int, d: int = D) -> int:
    sizes = ProblemSizes(length, length, d, d)
    return formulas.flash1_forward(sizes, TileVisits.full(sizes, *tile_sizes(on_chip, d))).moved


def standard_moved(length: int, d: int = D) -> int:
    return formulas.standard_forward(ProblemSizes(length, length, d, d)).moved


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("on_chip", [2**14, 2**16, 2**18])
def test_flash1_moves_t2_d2_over_m(d, on_chip):
    """12 T**2 d**2 / M: each of T * 4 T d / M visited queries reads q and o and writes o, 3 d beside its
    statistics.
    """
    length = 2**17
    assert 12 < flash1_moved(length, on_chip, d) / (length**2 * d**2 / on_chip) < 13.2
    assert flash1_moved(length, on_chip, d) / flash1_moved(length, 2 * on_chip, d) == pytest.approx(
        2, rel=0.02
    )
    assert flash1_moved(2 * length, on_chip, d) / flash1_moved(length, on_chip, d) == pytest.approx(
        4, rel=0.01
    )


def test_counted_flash1_traffic_falls_as_the_fast_memory_grows():
    head = make(192, 192, 4, 4)
    counts = []
    for on_chip in (64, 128, 256, 512):
        rows, columns = tile_sizes(on_chip, 4)
        counts.append(count(FORWARD["flash1"], head.change(rows=rows, columns=columns)).moved)
    assert all(1.85 < a / b < 2.0 for a, b in pairwise(counts)), counts


def test_what_tiling_gains():
    """Standard attention moves 4 T**2 whatever M is; FlashAttention's gain is M / (3 d**2), 4 at these
    sizes.
    """
    lengths = [2**n for n in range(10, 18)]
    gains = [standard_moved(length) / flash1_moved(length, M) for length in lengths]
    assert all(4 < standard_moved(length) / length**2 <= 4.25 for length in lengths)
    assert gains == sorted(gains)
    assert gains[0] > 3
    assert gains[-1] == pytest.approx(M / (3 * D**2), rel=0.03)
    # Where d**2 is no longer small against M, nothing is gained.
    assert standard_moved(4096, 128) < flash1_moved(4096, 16_384, 128)


def test_what_flash2_gains():
    """At equal square tiles it moves 2 d a visited row where the first moved 3 d + 4, and hardly writes."""
    length, tile = 2**14, 128
    assert 4 * tile * D + tile * tile <= M  # q, k, v, o and S fit
    sizes = ProblemSizes(length, length, D, D)
    full, causal = TileVisits.full(sizes, tile, tile), TileVisits.causal(length, tile)
    first, second = formulas.flash1_forward(sizes, full), formulas.flash2_forward(sizes, full)
    assert second.moved / first.moved == pytest.approx(2 * D / (3 * D + 4), rel=0.01)
    assert second.written == length * (D + 1) < first.written / 100
    assert formulas.flash2_forward(sizes, causal).moved == pytest.approx(second.moved / 2, rel=0.02)


def test_what_the_second_pass_of_the_flash2_backward_costs():
    """Two passes read more, by about a third; but they write every gradient once, where one pass adds 128
    times.
    """
    sizes = ProblemSizes(2**14, 2**14, D, D)
    visits = TileVisits.full(sizes, 128, 128)
    one, two = (
        formulas.flash2_backward_one_pass(sizes, visits),
        formulas.flash2_backward_two_pass(sizes, visits),
    )
    assert 1.3 < two.read / one.read < 1.4
    assert two.written == sizes.s * 3 * D + sizes.s  # dq, dk, dv and u
    assert one.written - two.written == 128 * sizes.s * D
    assert two.moved < 1.02 * one.moved


@pytest.mark.parametrize("name", VISITING)
def test_tiles_fit_on_chip(name):
    """Beside slow memory, torch never holds more than 4 M at once when tiles are meant for M; T * T is 16
    M.
    """
    on_chip, length, d = 256, 64, 2
    rows, columns = tile_sizes(on_chip, d)
    head, (run, formula) = make(length, length, d, d, rows=rows, columns=columns), VISITING[name]
    peak, _ = allocations(lambda: run(head, SlowMemory()))
    results = length * d * (1 if name in FORWARD else 3)
    # A backward run makes its own forward pass, of which the output and at most two statistics stay.
    saved = 0 if name in FORWARD else length * (d + 2)
    assert 0 < peak / 8 - results - formula(head.sizes, head.visits()).extra - saved < 4 * on_chip


def test_extra_memory():
    """Quadratic for standard attention, columns * T for incremental, linear for both FlashAttentions."""
    for length in (256, 512):
        sizes = ProblemSizes(length, length, D, D)
        visits = TileVisits.full(sizes, 32, 32)
        assert formulas.standard_forward(sizes).extra == 2 * length**2
        assert formulas.incremental_forward(sizes, visits, 32).extra == length * (32 + 2)
        assert formulas.flash1_forward(sizes, visits).extra == 2 * length
        assert formulas.flash2_forward(sizes, visits).extra == length
        assert formulas.flash2_backward_two_pass(sizes, visits).extra == length
