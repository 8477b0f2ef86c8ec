"""Any view of the same values gives the same result: P14 and faults 40 to 49."""

import pytest
import torch
from helpers import Problem, assert_same_bits, make

from attnlib import (
    CAUSAL,
    FULL,
    KVLayout,
    KVView,
    Mask,
    attention_with_lse,
    cached_attention_with_lse,
    sliding,
)
from attnlib.dispatch.storage import write_cache

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def layouts(x):
    """Views with the values of x in every memory layout that a caller may hold."""
    b, s, h, d = x.shape
    yield "40 fused", torch.stack((x, x, x), 2).unbind(2)[1]
    yield "40 fused last", torch.cat((x, x), -1)[..., d:]
    yield "41 transposed", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "41 sequence first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "42 last dimension strided", x.transpose(1, 3).contiguous().transpose(1, 3)
    yield "42 every second", torch.stack((x, x), -1).flatten(-2)[..., ::2]
    yield "45 odd offset", torch.cat((x[..., :1], x), -1)[..., 1:]
    yield "45 odd storage", torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    yield "47 far strides", x.new_empty(b, 10 * s, h, 3 * d)[:, ::10, :, :d].copy_(x)


@BACKENDS
@pytest.mark.parametrize("options", [(), ("softcap",)], ids=["fused", "tiles"])
@pytest.mark.parametrize("dims", [(8, 8), (1, 1), (8, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p14_any_layout_gives_the_same(backend, options, dims, dtype):
    """To the bit, but where BLAS adds up in another order: misaligned, of width 1, or in the reference's
    products.
    """
    problem = make(2, 17, 17, 4, 2, *dims, options=options, dtype=dtype)
    wanted = problem.with_gradients(
        attention_with_lse, *(directions := problem.directions()), backend=backend
    )
    for changed in ("q", "k", "v", "qkv"):
        variants = [dict(layouts(getattr(problem, n))) for n in changed]
        for name in variants[0]:
            views = {n: views[name].detach() for n, views in zip(changed, variants, strict=True)}
            ours = problem.change(**views).with_gradients(attention_with_lse, *directions, backend=backend)
            aligned = all(x.data_ptr() % 64 == 0 for x in views.values())
            if backend == "torch" and aligned and dims != (1, 1):
                assert_same_bits(*((ours[key], wanted[key]) for key in wanted))
            torch.testing.assert_close(ours, wanted)


@BACKENDS
@pytest.mark.parametrize("t", [1, 33, 65])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, sliding(4)])
def test_43_44_expanded_and_overlapping_inputs(backend, t, mask):
    problem = make(2, 33, t, 4, 4, 8, mask=mask)
    across_heads, across_batch = (
        torch.randn(2, t, 1, 8).expand(2, t, 4, 8),
        torch.randn(1, t, 4, 8).expand(2, t, 4, 8),
    )
    overlapping = torch.randn(t * 8 + 200).as_strided((2, t, 4, 8), (16, 8, 4, 1))
    for x in (across_heads, across_batch, overlapping):
        shared, alone = (problem.change(k=y, v=y).solve(backend=backend) for y in (x, x.contiguous()))
        assert_same_bits(*zip(shared, alone, strict=True))


def test_47_a_stride_of_more_than_int32():
    torch.use_deterministic_algorithms(False)  # filling 4 GiB would touch them
    storage = torch.empty(2**31 + 4096, dtype=torch.float16)
    problem = make(2, 17, 17, 2, 1, 8, dtype=torch.float16)
    far = storage.as_strided((2, 17, 1, 8), (2**31, 8, 8, 1))
    far.copy_(problem.k)
    assert_same_bits(*zip(problem.change(k=far).solve(), problem.solve(), strict=True))
    assert_same_bits(*zip(problem.change(v=far).solve(), problem.change(v=problem.k).solve(), strict=True))


@BACKENDS
@pytest.mark.parametrize("order", ["pages first", "heads first"])
def test_48_49_a_narrowed_table_over_interleaved_pages(backend, order):
    pages, size, g, d = 9, 4, 2, 8
    pool = torch.randn(pages, size, g, 2 * d)
    pool = pool.transpose(1, 2).contiguous().transpose(1, 2) if order == "heads first" else pool
    wide = torch.full((2, 7), 2147480000, dtype=torch.int32)
    wide[0, :3], wide[1, :1] = ints(5, 0, 7), ints(3)
    starts, lengths = ints(0, 1), ints(11, 3)
    kv = KVView(KVLayout.grouped(g, d), size, pool[..., :d], pool[..., d:], wide[:, :3], starts, lengths)
    q = torch.randn(2, 2, 4, d)
    out, lse = cached_attention_with_lse(q, kv, mask=CAUSAL, backend=backend)
    for n, (start, length) in enumerate(((0, 11), (1, 3))):
        stored = pool[wide[n, : -(-length // size)].long()].flatten(0, 1)[None, :length]
        one = Problem(q[n : n + 1], stored[..., :d], stored[..., d:], CAUSAL, {"key_starts": ints(start)})
        for ours, wanted in zip((out[n], lse[n]), one.solve(), strict=True):
            torch.testing.assert_close(ours, wanted[0])


@BACKENDS
def test_51_a_page_whose_offset_is_more_than_int32(backend):
    torch.use_deterministic_algorithms(False)  # filling 4 GiB would touch them
    storage = torch.empty(2**31 + 4096, dtype=torch.float16)
    pool = storage.as_strided((3, 4, 1, 8), (2**30, 8, 8, 1))
    assert pool[2].storage_offset() == 2**31
    layout, near = KVLayout.grouped(1, 8, dtype=torch.float16), torch.randn(3, 4, 1, 8).half()
    table, lengths = ints(2, 0)[None], ints(7)
    view = KVView(layout, 4, pool, pool, table, ints(0), lengths)
    for page in (2, 0):
        write_cache(view, near[page], near[page], page * 4 + torch.arange(4))
        assert_same_bits((pool[page], near[page]))
    q = torch.randn(1, 2, 2, 8).half()
    small = KVView(layout, 4, near, near, table, ints(0), lengths)
    far, wanted = (cached_attention_with_lse(q, kv, mask=CAUSAL, backend=backend) for kv in (view, small))
    assert_same_bits(*zip(far, wanted, strict=True))


def a_view(*, table, lengths, starts=(0,), size=4):
    pool = torch.randn(3, size, 1, 8)
    layout = KVLayout.grouped(1, 8)
    return KVView(
        layout, size, pool, pool, torch.tensor(table, dtype=torch.int32), ints(*starts), ints(*lengths)
    )


@pytest.mark.parametrize(
    ("table", "lengths", "words"),
    [
        ([[0, 1]], (9,), "lengths: expected at most 8 tokens like the table, got 9"),
        ([[0]], (5,), "lengths: expected at most 4 tokens like the table, got 5"),
        ([[0, -1]], (5,), r"table: expected pages in \[0, 3\), got -1 to 0 in sequence 0"),
        ([[3, 0]], (5,), r"table: expected pages in \[0, 3\), got 0 to 3 in sequence 0"),
        ([[0, 2**31 - 1]], (5,), r"table: expected pages in \[0, 3\), got 0 to 2147483647 in sequence 0"),
        ([[3]], (1,), r"table: expected pages in \[0, 3\), got 3 to 3 in sequence 0"),
        ([[-1]], (4,), r"table: expected pages in \[0, 3\), got -1 to -1 in sequence 0"),
    ],
)
@BACKENDS
def test_76_77_lengths_and_pages_that_do_not_exist(backend, table, lengths, words):
    """The host reads them on a CPU, so nothing else is read."""
    view = a_view(table=table, lengths=lengths)
    with pytest.raises(ValueError, match=words):
        cached_attention_with_lse(torch.randn(1, 1, 2, 8), view, mask=CAUSAL, backend=backend)


@BACKENDS
def test_78_79_garbage_beside_what_is_used_and_a_page_twice(backend):
    q, garbage = torch.randn(1, 2, 2, 8), 2**31 - 1
    view = a_view(table=[[-7, 1, 1, garbage]], lengths=(11,), starts=(4,))
    out, lse = cached_attention_with_lse(q, view, mask=CAUSAL, backend=backend)
    stored = view.k[[1, 1]].flatten(0, 1)[None, :7]
    wanted = Problem(q, stored, stored, CAUSAL).solve()
    torch.testing.assert_close((out, lse), wanted)


@pytest.mark.parametrize(
    "sizes", [(1, 66_000, 66_000, 1, 1, 2), (66_000, 1, 1, 1, 1, 2), (2, 3, 5, 4096, 4096, 2)]
)
def test_52_many_rows_batches_and_heads(sizes):
    problem = make(*sizes, mask=sliding(3))
    out, lse = problem.solve()
    assert out.isfinite().all()
    last = problem.change(**{n: getattr(problem, n)[-1:, -3:, -1:] for n in "qkv"}).solve()
    torch.testing.assert_close((out[-1:, -1:, -1:], lse[-1:, -1:, -1:]), (last[0][:, -1:], last[1][..., -1:]))


@BACKENDS
@pytest.mark.parametrize("size", [1, 3, 16, 512, 600, 1024, 1400])
@pytest.mark.parametrize("mask", [CAUSAL, sliding(700), Mask(None, -3, 20)])
def test_pages_of_any_size(backend, size, mask):
    """Ragged queries, and rows that belong to nobody, over sequences of which one starts late and one is
    empty.
    """
    lengths, starts, used = (1300, 17, 0), (620, 0, 0), (2, 3, 1)
    pages = [-(-length // size) for length in lengths]
    table = torch.full((3, max(pages) + 1), -7, dtype=torch.int32)
    order = torch.randperm(sum(pages) + 1)
    k, v = (torch.full((sum(pages) + 1, size, 1, d), torch.nan, dtype=torch.float64) for d in (8, 5))
    q = torch.randn(sum(used) + 2, 2, 8, dtype=torch.float64)
    wanted, row = [], 0
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mine, order = order[: pages[n]], order[pages[n] :]
        table[n, start // size : pages[n]] = mine[start // size :]
        new_k, new_v = (torch.randn(length, 1, d, dtype=torch.float64) for d in (8, 5))
        j = torch.arange(start, length)
        k[mine[j // size], j % size], v[mine[j // size], j % size] = new_k[start:], new_v[start:]
        queries = q[None, row : row + used[n]]
        wanted.append(Problem(queries, new_k[None], new_v[None], mask, {"key_starts": ints(start)}).solve())
        row += used[n]
    layout = KVLayout.grouped(1, 8, 5, dtype=torch.float64)
    kv = KVView(layout, size, k, v, table, ints(*starts), ints(*lengths), cu_seqlens_q=ints(0, 2, 5, 6))
    out, lse = cached_attention_with_lse(q, kv, mask=mask, backend=backend)
    torch.testing.assert_close(out[:6], torch.cat([x[0][0] for x in wanted]))
    torch.testing.assert_close(lse[:, :6], torch.cat([x[1][0] for x in wanted], 1))
    assert (out[6:] == 0).all()
    assert (lse[:, 6:] == -torch.inf).all()
