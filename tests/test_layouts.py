"""Any view of the same values gives the same result: P14 and faults 40 to 49 of notes/reliability.md."""

import pytest
import torch
from helpers import Problem, assert_same_bits, make

from attnlib import CAUSAL, FULL, KVLayout, KVView, attention_with_lse, cached_attention_with_lse, sliding

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
    """To the bit, but where BLAS adds up in another order: misaligned, of width 1, or in the reference's products."""
    problem = make(2, 17, 17, 4, 2, *dims, options=options, dtype=dtype)
    wanted = problem.with_gradients(attention_with_lse, *(directions := problem.directions()), backend=backend)
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
    across_heads, across_batch = torch.randn(2, t, 1, 8).expand(2, t, 4, 8), torch.randn(1, t, 4, 8).expand(2, t, 4, 8)
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


@pytest.mark.parametrize("sizes", [(1, 66_000, 66_000, 1, 1, 2), (66_000, 1, 1, 1, 1, 2), (2, 3, 5, 4096, 4096, 2)])
def test_52_many_rows_batches_and_heads(sizes):
    problem = make(*sizes, mask=sliding(3))
    out, lse = problem.solve()
    assert out.isfinite().all()
    last = problem.change(**{n: getattr(problem, n)[-1:, -3:, -1:] for n in "qkv"}).solve()
    torch.testing.assert_close((out[-1:, -1:, -1:], lse[-1:, -1:, -1:]), (last[0][:, -1:], last[1][..., -1:]))
