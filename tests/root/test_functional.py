"""Laws of attention, P1 to P16, on every backend; its definition and its precision come first."""

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, OPTIONS, assert_defined, assert_precise, assert_same_bits, make, masks, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    attention_with_lse,
    sliding,
    varlen_attention,
    varlen_attention_with_lse,
)

backends = st.sampled_from(("torch", "torch", "torch", "reference"))
short = (0, 1, 2, 7, 17)
seeds = st.integers(0, 2**16)


def close(*pairs):
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@settings(max_examples=60)
@given(problems())
def test_torch_is_the_definition(problem):
    assert_defined(problem, "torch")


@settings(max_examples=20)
@given(problems(lengths=short))
def test_reference_is_the_definition(problem):
    assert_defined(problem, "reference")


LONG = [
    (1100, 1100, CAUSAL, ()),
    (1100, 1100, sliding(300), ("softcap",)),
    (70, 1100, CAUSAL, ("alibi_slopes", "dropout")),
    (1030, 600, Mask(None, -5, 90), ("sinks",)),
    (600, 1100, Mask(40, 700), ("bounds", "per_sequence_slopes")),
    (520, 513, FULL, ("bounds", "dropout", "sinks")),
    (700, 700, Mask(-20, None), OPTIONS),
]


@pytest.mark.parametrize(("s", "t", "mask", "options"), LONG)
def test_lengths_that_cross_tiles(s, t, mask, options):
    assert_defined(make(2, s, t, 2, 1, 8, 5, mask=mask, options=options))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", [CAUSAL, FULL])
def test_each_option_alone(option, mask):
    """On a call that torch's fused attention would solve without it."""
    assert_defined(make(2, 19, 19, 4, 2, 8, mask=mask, options=[option]))


@pytest.mark.parametrize(
    "mask", [CAUSAL, sliding(17), sliding(16), Mask(None, 0, 1), Mask(None, 0, 3), CAUSAL.shift(4)]
)
def test_what_only_looks_like_a_causal_square(mask):
    """As many keys as queries remain within the bounds, but just one sequence has its queries beside them."""
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 2, 4), (17, 18, 19, 21)))
    problem = make(4, 17, 21, 2, 1, 8, mask=mask)
    assert_defined(problem.change(options={"key_starts": starts, "key_ends": ends}))
    assert_defined(problem.change(k=problem.k[:, :17], v=problem.v[:, :17]))


@pytest.mark.parametrize("heads", [(9, 3), (15, 3), (12, 1), (7, 7), (64, 8)])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(9)])
def test_any_group_and_many_heads(heads, mask):
    assert_defined(make(3, 33, 40, *heads, 6, mask=mask))


@pytest.mark.parametrize("dims", [(1, 1), (7, 7), (59, 59), (111, 64), (192, 128), (320, 320), (576, 512)])
@pytest.mark.parametrize("options", [(), ("softcap", "sinks")])
def test_any_head_dimension(dims, options):
    assert_defined(make(2, 19, 23, 4, 2, *dims, options=options))


# No window of a key or two: the gradients of a softmax over one key are nothing but rounding.
wide_masks = st.sampled_from((FULL, CAUSAL, CAUSAL.shift(-3), sliding(17), Mask(9, 5), Mask(None, -3, 8)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_error_is_at_most_twice_that_of_eager_torch(dtype, data):
    sizes = {"lengths": (63, 65, 129, 257), "dims": (16, 59, 64, 111), "heads": ((1, 1), (3, 1), (4, 2))}
    assert_precise(data.draw(problems(**sizes, dtypes=(dtype,), mask=wide_masks)), "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [(), ("softcap",), ("sinks", "bounds")])
def test_massive_activations(dtype, options):
    problem = make(1, 65, 129, 2, 1, 64, options=options, dtype=dtype)
    assert_precise(problem.change(q=450 * problem.q, k=1900 * problem.k), "torch")


@given(problems(lengths=(1, 7, 17, 63), options=("sinks", "bounds")[1:]), backends, st.floats(-30, 30))
def test_p1_a_constant_on_every_logit_moves_only_the_lse(problem, backend, c):
    problem = problem.to(torch.float64).change(options=problem.options | {"scale": 0.25})
    before = problem.solve(backend=backend)
    ones = torch.ones_like(problem.q[..., :1])
    column = torch.full_like(problem.k[..., :1], 4 * c)
    moved = problem.change(q=torch.cat((problem.q, ones), -1), k=torch.cat((problem.k, column), -1))
    after = moved.solve(backend=backend)
    close((after[0], before[0]), (after[1], before[1] + c))


@given(problems(lengths=(1, 7, 17, 63), mask=st.just(FULL), options=("scale", "softcap", "sinks")), backends)
def test_p2_the_order_of_keys_does_not_matter(problem, backend):
    problem = problem.to(torch.float64)
    order = torch.randperm(problem.k.shape[1])
    mixed = problem.change(k=problem.k[:, order], v=problem.v[:, order])
    close(*zip(mixed.solve(backend=backend), problem.solve(backend=backend), strict=True))


@given(problems(lengths=(1, 7, 17, 63), options=("scale", "softcap", "alibi_slopes", "bounds")), backends)
def test_p3_outputs_lie_between_the_values(problem, backend):
    problem = problem.to(torch.float64)
    out, lse = problem.solve(backend=backend)
    v = problem.v.repeat_interleave(out.shape[2] // problem.v.shape[2], 2)
    seen = (lse > -torch.inf).transpose(1, 2)[..., None]
    low, high = (x.unsqueeze(1).expand_as(out) for x in (v.amin(1), v.amax(1)))
    slack = 1e-12 * problem.v.abs().max()
    assert (((out >= low - slack) & (out <= high + slack)) | ~seen).all()
    assert (out.masked_fill(seen, 0) == 0).all()
    out = problem.change(v=torch.full_like(problem.v, 0.7)).solve(backend=backend)[0]
    close((out, torch.full_like(out, 0.7).masked_fill(~seen, 0)))


@given(
    problems(lengths=(17, 63, 65), mask=st.just(CAUSAL), options=("softcap", "sinks", "dropout")),
    backends,
    seeds,
)
def test_p5_later_tokens_change_no_bit_of_earlier_rows(problem, backend, seed):
    s, t = problem.q.shape[1], problem.k.shape[1]
    cut = t - seed % min(s, t)
    k, v = problem.k.clone(), problem.v.clone()
    k[:, cut:], v[:, cut:] = torch.randn_like(k[:, cut:]), torch.randn_like(v[:, cut:])
    rows = s - (t - cut)
    before, after = (p.solve(backend=backend) for p in (problem, problem.change(k=k, v=v)))
    assert_same_bits((before[0][:, :rows], after[0][:, :rows]), (before[1][..., :rows], after[1][..., :rows]))


@given(
    problems(lengths=(1, 7, 17, 63), options=("softcap", "alibi_slopes", "sinks")),
    backends,
    st.integers(1, 9),
)
def test_p6_queries_in_chunks_equal_queries_at_once(problem, backend, chunk):
    problem = problem.to(torch.float64)
    problem = problem.change(q=problem.q[:, -problem.k.shape[1] :], mask=Mask(problem.mask.left, 0))
    s, t = problem.q.shape[1], problem.k.shape[1]
    parts = []
    for a in range(0, s, chunk):
        end = t - s + min(a + chunk, s)
        part = problem.change(q=problem.q[:, a : a + chunk], k=problem.k[:, :end], v=problem.v[:, :end])
        parts.append(part.solve(backend=backend))
    outs, lses = zip(*parts, strict=True)
    whole = problem.solve(backend=backend)
    close((torch.cat(outs, 1), whole[0]), (torch.cat(lses, 2), whole[1]))


@given(problems(lengths=short, heads=((6, 2), (3, 1), (5, 1), (12, 4))), backends)
def test_p8_grouped_heads_equal_repeated_heads(problem, backend):
    problem = problem.to(torch.float64)
    f = problem.q.shape[2] // problem.k.shape[2]
    repeated = problem.change(k=problem.k.repeat_interleave(f, 2), v=problem.v.repeat_interleave(f, 2))
    close(*zip(problem.solve(backend=backend), repeated.solve(backend=backend), strict=True))


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


lengths = st.lists(st.tuples(st.sampled_from(short), st.sampled_from(short)), max_size=5)


@given(
    lengths, masks(20), st.sets(st.sampled_from(sorted({*OPTIONS} - {"bounds", "dropout"}))), backends, seeds
)
def test_p9_packed_equals_a_loop_over_sequences(lengths, mask, options, backend, seed):
    torch.manual_seed(seed)
    (s, t), b = (sum(x) for x in zip(*lengths, (0, 0), strict=True)), len(lengths)
    problem = make(1, s, t, 6, 2, 8, 5, mask=mask)
    if b:
        problem = problem.change(options=make(b, 1, 1, 6, 2, 1, options=sorted(options)).options)
    problem = problem.to(torch.float64)
    packing = {"cu_seqlens_q": offsets(s for s, _ in lengths), "cu_seqlens_k": offsets(t for _, t in lengths)}
    q, k, v = (x[0] for x in problem.tensors)
    out, lse = varlen_attention_with_lse(q, k, v, mask=mask, **packing, **problem.options, backend=backend)
    assert (out.shape, lse.shape) == ((s, 6, 5), (6, s))
    pairs = (pairwise(packing[f"cu_seqlens_{x}"].tolist()) for x in "qk")
    for n, ((a, b), (c, d)) in enumerate(zip(*pairs, strict=True)):
        alone = dict(problem.options)
        if "alibi_slopes" in alone:
            alone["alibi_slopes"] = alone["alibi_slopes"].expand(len(lengths), 6)[n]
        one = attention_with_lse(
            q[None, a:b], k[None, c:d], v[None, c:d], mask=mask, **alone, backend=backend
        )
        close((out[a:b], one[0][0]), (lse[:, a:b], one[1][0]))


ragged = st.lists(st.integers(0, 17), min_size=1, max_size=4)


@given(ragged, masks(20), st.sets(st.sampled_from(OPTIONS)), backends, seeds)
def test_packed_equals_tail_padded(lengths, mask, options, backend, seed):
    torch.manual_seed(seed)
    b, t = len(lengths), max(*lengths, 1) + 2
    chosen = sorted({*options} - {"bounds"})
    problem = make(b, t, t, 6, 2, 8, 5, mask=mask, options=chosen).to(torch.float64)
    ends = torch.tensor(lengths, dtype=torch.int32)
    inside = torch.arange(t) < ends[:, None]
    packed = [x[inside] for x in problem.tensors]
    cu = offsets(lengths)
    bits = varlen_attention(
        *packed, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=mask, **problem.options, backend=backend
    )
    padded = problem.change(options=problem.options | {"key_ends": ends}).solve(backend=backend)[0]
    close((bits, padded[inside]))
    for n, length in enumerate(
        lengths
    ):  # and equal to dense calls on each, whose dropout counts as sequence 0
        if "dropout" not in options and "per_sequence_slopes" not in options:
            dense = attention(*(x[n : n + 1, :length] for x in problem.tensors), mask=mask, **problem.options)
            close((dense[0], padded[n, :length]))


@given(problems(lengths=short), backends, st.sampled_from((0.25, 0.5, 2.0, 8.0)))
def test_p12_a_power_of_two_may_move_between_q_and_the_scale(problem, backend, a):
    scale = problem.options.get("scale", 0.3)
    one = problem.change(options=problem.options | {"scale": scale})
    two = problem.change(q=problem.q * a, options=problem.options | {"scale": scale / a})
    assert_same_bits(*zip(one.solve(backend=backend), two.solve(backend=backend), strict=True))


@given(problems(lengths=short, heads=((6, 2), (3, 3))), backends, seeds)
def test_p15_a_sequence_does_not_see_the_others(problem, backend, seed):
    n = seed % problem.q.shape[0]
    others = [torch.full_like(x, torch.nan) for x in problem.tensors]
    for x, old in zip(others, problem.tensors, strict=True):
        x[n] = old[n]
    alone = problem.change(q=others[0], k=others[1], v=others[2])
    for a, b in zip(alone.solve(backend=backend), problem.solve(backend=backend), strict=True):
        close((a[n], b[n]))


@given(problems(lengths=short, options=("alibi_slopes", "sinks", "bounds")), backends)
def test_p16_a_wide_window_and_a_high_cap_change_nothing(problem, backend):
    problem = problem.to(torch.float64)
    s, t = problem.q.shape[1], problem.k.shape[1]
    band = Mask(problem.mask.left, problem.mask.right)
    wide = Mask(s + t if band.left is None else band.left, s + t if band.right is None else band.right)
    capped = problem.change(mask=band, options=problem.options | {"softcap": 1e7})
    for other in (problem.change(mask=wide), capped):
        close(
            *zip(other.solve(backend=backend), problem.change(mask=band).solve(backend=backend), strict=True)
        )


@given(problems(lengths=(1, 7, 17, 65), options=(), heads=((2, 2), (3, 3))), backends)
def test_a_shift_gives_the_top_left_alignment(problem, backend):
    problem = problem.to(torch.float64)
    s, t = problem.q.shape[1], problem.k.shape[1]
    out = problem.change(mask=CAUSAL.shift(s - t)).solve(backend=backend)[0]
    sdpa = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in problem.tensors), is_causal=True)
    close((out, sdpa.transpose(1, 2)))


@given(problems(lengths=short), backends)
def test_calls_are_pure_and_repeat_to_the_bit(problem, backend):
    before = [x.clone() for x in problem.leaves]
    runs = [problem.solve(backend=backend) for _ in range(2)]
    assert_same_bits(*zip(*runs, strict=True))
    assert_same_bits((runs[0][0], problem.solve(attention, backend=backend)))
    assert_same_bits(*zip(problem.leaves, before, strict=True))


def test_a_seed_is_drawn_for_dropout():
    problem = make(1, 9, 9, 2, 1, 8).change(options={"dropout_p": 0.5})
    first = problem.solve(attention)
    assert not torch.equal(first, problem.solve(attention))
    torch.manual_seed(0)
    make(1, 9, 9, 2, 1, 8)
    assert_same_bits((first, problem.solve(attention)))
    given = problem.change(options={"dropout_p": 0.5, "dropout_seed": torch.tensor([5])})
    assert_same_bits((given.solve(attention), given.solve(attention)))
