"""The decode kernels by the accuracy rule: every layout, page, option and kind of step; and the laws of a
cache.
"""

from dataclasses import replace
from itertools import cycle, islice
from types import SimpleNamespace

import decode_helpers
import pytest
import torch
from compiled.builds import pairwise
from decode_helpers import Call, Sizes, assert_right, moved_pages, near, plan_for, store
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import CAUSAL, FULL, KVCache, KVLayout, Mask, explain, merge_states, sliding
from attnlib import cached_attention_with_lse as attend
from attnlib.backends._triton.decode import operators as triton_cached
from attnlib.backends._triton.decode import shapes as decode_shapes
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.backends.operators import flat_over_view
from attnlib.call.call import Call as Attention
from attnlib.call.call import Score, checked

# The interpreter truncates to bf16 where torch rounds.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
WINDOW = 9 if INTERPRETED else 33
FACTORS = {
    "layout": (
        (2, 16, 16),
        (1, 59, 24),
        (1, 160, 16),
        (64, 16),
        (48, 8),
        (32, 0),
    ),  # (g, d, e), or (rank, rope)
    "group": (1, 3, 8),
    "page": (1, 4, 16, 24, 7, 3, None),
    "lengths": ("edges", "ragged"),
    "queries": (1, 5, (1, 1, 1), (0, 1, 3), (17, 1, 0)),
    "bounds": ("none", "padding", "window"),
    "mask": (CAUSAL, FULL, sliding(WINDOW), Mask(None, 0, 9), Mask(7, 3), Mask(None, -2)),
    "options": ((), ("softcap",), ("alibi_slopes", "sinks"), ("per_sequence_slopes", "scale")),
    "store": (None, torch.int8, torch.float8_e4m3fn),
    "sigma": (1.0, 0.01, 10.0),
    "dtype": DTYPES,
    "processors": (2, 1, 7),
    "is_split": (True, False),
    "order": ("pages", "heads", "apart"),
    "tiles": (LaunchConfig(16, 16, 2, 4), LaunchConfig(16, 32, 1, 4, resident=1), LaunchConfig(32, 16, 2, 4)),
}
if not INTERPRETED:  # the shipped tiles, and what takes the interpreter minutes
    FACTORS |= {
        "layout": (
            (8, 128, 128), (1, 128, 128), (4, 64, 64), (1, 59, 24), (2, 80, 80), (8, 96, 96), (2, 192, 128),
            (2, 256, 256), (512, 64), (128, 0), (64, 16), (300, 20), (48, 8),
        ),
        "group": (1, 3, 4, 8, 32),
        "page": (1, 4, 16, 64, 256, None, 7, 24, 48, 96, 672),
        "lengths": ("edges", "ragged", "long"),
        "queries": (1, 2, 17, 40, (1, 1, 1), (0, 1, 3), (40, 1, 7)),
        "processors": (None, 1, 7, 33, 1000),
        "is_split": (True,),
        "tiles": (None,),
    }  # fmt: skip
CASES = pairwise(FACTORS)
SMALL = KVLayout.grouped(2, 16)
LATENT = KVLayout.latent(32, 8)
RAGGED = (50, 0, 19) if INTERPRETED else (700, 0, 129, 127, 128)

# numpy's, of NaN inputs
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:RuntimeWarning") for text in ("invalid value", "All-NaN")
]


@pytest.fixture
def plan(monkeypatch):
    """Plans as they ship, or on the interpreter with small tiles and short splits; call it for others."""

    def anew(**changes):
        small = {"tiles": LaunchConfig(16, 16, 2, 4), "small": True} if INTERPRETED else {}
        plan_for(monkeypatch, **(small | {name: x for name, x in changes.items() if x is not None}))

    anew()
    yield anew
    monkeypatch.undo()
    plan_for(monkeypatch)


def call_of(case: SimpleNamespace) -> Call:
    numbers = {
        "dtype": case.dtype,
        "storage_dtype": case.store,
        "window": WINDOW if case.bounds == "window" else None,
    }
    layout = (KVLayout.latent if len(case.layout) == 2 else KVLayout.grouped)(*case.layout, **numbers)
    page, heads = case.page or 32, min(case.group, 32 // layout.heads) * layout.heads
    long = 5000 if heads * layout.dim <= 1024 else 1500
    lengths = {"edges": (0, 1, page - 1, page, page + 1), "ragged": RAGGED, "long": (long, 3)}[case.lengths]
    counts = [case.queries] * len(lengths)
    if not isinstance(case.queries, int):
        case.queries = counts = list(islice(cycle(case.queries), len(lengths)))
    starts = {"none": (), "padding": [length // 3 for length in lengths]}.get(case.bounds)
    mask = case.mask
    if case.bounds == "window":  # dropped pages, those of a contiguous cache excepted
        reach = [max(0, n - count - WINDOW + 1) for n, count in zip(lengths, counts, strict=True)]
        starts = () if case.page is None else [n // page * page for n in reach]
        mask = mask if mask.left is not None and mask.left < WINDOW else sliding(WINDOW)
    stored = store(layout, Sizes(lengths, starts, case.page, case.order), case.sigma)
    return stored.call(case.queries, heads, mask, case.options)


def name(cases: list[dict]) -> str:
    return "-".join(str(level).replace("torch.", "") for level in cases[0].values() if level is not None)


# Under the interpreter hundreds of tests would be too many.
@pytest.mark.parametrize(
    "cases", [CASES[n::2] for n in range(2)] if INTERPRETED else [[x] for x in CASES], ids=name
)
def test_any_call(cases, plan):
    for given in cases:
        case = SimpleNamespace(**given)
        plan(processors=case.processors, tiles=case.tiles, is_split=case.is_split)
        call = call_of(case)
        assert_right(call if case.sigma == 1 else call.scheduled())


def test_a_value_that_is_not_finite_stays_in_its_sequence(plan):
    """It reaches those that see it. A value may spoil its channel for others of its head; a key spoils nobody
    else.
    """
    kinds = (
        (SMALL, CAUSAL, 5, 1),
        (replace(SMALL, storage_dtype=torch.int8), Mask(1, 1), (5, 7, 5), 7),
        (LATENT, Mask(None, -1, 6), 5, 7),
        (SMALL, sliding(3), (1, 9, 1), 7),
    )
    for layout, mask, counts, processors in kinds:
        plan(processors=processors)
        call = store(layout, Sizes((20, 21, 5), page_size=4)).call(counts, 4, mask)
        before, view, at = call.solve(), call.stored.view, 19
        (out, _), heads = call.of(1, *before), 4 // layout.heads
        queries = torch.arange(21 - out.shape[1], 21)
        broken = torch.zeros(out.shape[1:], dtype=torch.bool)
        spoiled = broken.clone()
        page = int(view.table[1, 4])
        if layout.storage_dtype:
            view.v_scale[page, at % 4, 0] = torch.inf
            broken[mask.visible(queries, torch.tensor(at)), :heads] = True
            spoiled[:, :heads] = True
        else:
            plane = view.k_rope if layout.is_latent else view.k
            plane[page, at % 4, 0, 3] = torch.nan
            broken[mask.visible(queries, torch.tensor(at)), :heads] = True
            if not layout.is_latent:
                view.v[page, at % 4 - 1, 1, 3] = -torch.inf
                broken[mask.visible(queries, torch.tensor(at - 1)), heads:, 3] = True
                spoiled[:, heads:, 3] = True
        after = call.solve()
        assert 0 < int(broken.any(-1).any(-1).sum()) < len(queries)
        ours, spoiled = call.of(1, *after)[0][0], spoiled | broken
        assert (~ours.isfinite())[broken].all()
        assert_same_bits((out[0][~spoiled], ours[~spoiled]))
        for n in (0, 2):
            assert_same_bits(*zip(call.of(n, *before), call.of(n, *after), strict=True))


def test_a_value_of_no_weight_is_not_hidden(plan):
    """Not a number at the least weight is none either, whether in a part of its own or not."""
    grain = 16 if INTERPRETED else 128
    for processors in (1, 7):
        plan(processors=processors)
        call = store(KVLayout.grouped(1, 16), Sizes((5 * grain,), page_size=grain)).call(1, 1)
        view = call.stored.view
        page = int(view.table[0, 0])
        view.k[page] = -1e4 * call.q[0, 0].sign().to(DEVICE)
        assert call.solve()[0].isfinite().all()
        view.v[page, 3] = torch.nan
        assert call.solve()[0].isnan().all()


def test_where_tokens_lie_does_not_matter(plan):
    """P7, P14: in pages of any order, rows of any length and planes of any strides the same bits, and in
    pages of any size the same within rounding."""
    orders = (
        (4, "pages"),
        (4, "heads"),
        (4, "apart"),
        (1, "pages"),
        (None, "apart"),
        (3, "pages"),
        (24, "heads"),
    )
    for layout in (SMALL, replace(LATENT, storage_dtype=torch.int8)):
        results = []
        for page, order in orders if layout is SMALL or not INTERPRETED else orders[1:4]:
            torch.manual_seed(1)
            stored = store(layout, Sizes((34, 18, 3), (7, 0, 2), page, order))
            torch.manual_seed(2)
            call = stored.call((1, 6, 3), 2 * layout.heads)
            results.append(call.solve())
            if order == "heads":
                assert_same_bits(*zip(moved_pages(call).solve(), results[-1], strict=True))
            if page == 4:
                assert_same_bits(*zip(results[0], results[-1], strict=True))
            torch.testing.assert_close(results[-1], results[0])


def test_sequences_splits_and_halves_make_no_difference(plan):
    """P4, P9, P15: each sequence alone, shared out among any number of programs, as two sets of keys merged;
    and to the bit with the schedule of a cache or none."""
    lengths = (35, 1, 12) if INTERPRETED else (5000, 1, 300)
    for counts in (1, (1, 1, 9)):
        call = store(KVLayout.grouped(1, 16), Sizes(lengths)).call(counts, 3)
        whole, splits = call.solve(), set()
        for processors in (1, 7) if INTERPRETED else (1, 2, 7, 33):
            plan(processors=processors)
            scheduled = call.scheduled()
            result = scheduled.solve()
            assert_same_bits(*zip(result, call.solve(), strict=True))
            torch.testing.assert_close(result, whole)
            splits.add(int(scheduled.stored.view.schedule[0, 0, 0, 5]))
        assert max(splits) > 2  # and those of one token have one
        view = call.stored.view
        for n in range(3):
            q, _ = call.of(n, call.q, call.q[..., 0].transpose(-1, -2))
            one = {name: getattr(view, name)[n : n + 1] for name in ("table", "starts", "lengths")}
            alone = replace(call.over(**one, cu_seqlens_q=None), q=q, counts=q.shape[1])
            torch.testing.assert_close(alone.solve(), call.of(n, *whole))
        call, middle = replace(call, mask=FULL), view.lengths // 2
        halves = call.over(lengths=middle).solve(), call.over(starts=middle).solve()
        torch.testing.assert_close(merge_states(*halves[0], *halves[1]), call.solve())


@pytest.mark.parametrize("layout", [KVLayout.grouped(1, 16), LATENT], ids=["grouped", "latent"])
def test_a_long_prompt_among_single_tokens(layout, plan):
    """A sequence with more rows than splits have room for has none, however many splits it would have."""
    length, count = (72, 40) if INTERPRETED else (9000, 700)
    call = store(layout, Sizes((12, length, 1))).call((1, count, 1), 3, options=("sinks",))
    for processors in (1, 2, 7) if INTERPRETED else (1, 2, 7, 132):
        plan(processors=processors)
        assert_right(call.scheduled())


def test_many_rows_of_nobody(plan, monkeypatch):
    """After the last sequence of a captured step that holds less than it could: 0, whether or not they fit a
    tile.
    """
    made = triton_cached.outputs
    monkeypatch.setattr(
        triton_cached, "outputs", lambda *given: tuple(x.fill_(torch.nan) for x in made(*given))
    )
    monkeypatch.setattr(decode_helpers, "SLACK", 40)
    for processors in (1, 7):
        plan(processors=processors)
        for counts in ((1, 2, 1), (1, 1, 5)):
            assert_right(store(SMALL, Sizes((20, 50, 3))).call(counts, 6).scheduled())


def test_a_cache_of_forked_and_truncated_sequences(plan, monkeypatch):
    """P6, P18: after every step what eager attention reads of the cache, whose free pages are NaN."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layouts = (SMALL, replace(LATENT, window=9))
    cache = KVCache.paged(layouts, pages=40, page_size=4, max_sequences=4, rollback=8, device=DEVICE)

    def check(view, shape, width):
        q, mask = torch.randn(*shape, 4, width, device=DEVICE), CAUSAL if width == 16 else sliding(9)
        ours = attend(q, view, mask=mask, backend="triton")
        torch.testing.assert_close(
            [x.cpu() for x in ours], [*attend(q.cpu(), near(view), mask=mask, backend="reference")]
        )

    def step(tokens):
        with cache.step(tokens) as layers:
            shape = layers[0].positions.shape
            new = [torch.randn(*shape, *width, device=DEVICE) for width in ((2, 16), (2, 16), (32,), (8,))]
            check(layers[0].append(*new[:2]), shape, 16)
            check(layers[1].append(*new[2:]), shape, 40)

    one, two = cache.admit(2)
    step({two: 3, one: 30})
    (three,) = cache.fork(one)
    step(1)
    cache.truncate(one, 27)
    step({three: 1, one: 3, two: 5})
    cache.release(two)
    step({})
    (four,) = cache.admit()
    step({four: 18, one: 0, three: 1})
    step(2)
    with cache.read({four: 3, one: 1}) as layers:  # tokens that were there before
        check(layers[0].view(), (4,), 16)


def test_nothing_to_do(plan):
    """No sequence, no token, no query for any: empty results, and 0 and -inf for rows of nobody."""
    for lengths, counts, rows in (
        ((), 1, 0),
        ((), (), 3),
        ((5,) * 9, 0, 0),
        ((5,) * 9, (0,) * 9, 3),
        ((0, 0), 1, 2),
    ):
        call = store(SMALL, Sizes(lengths)).call(counts, 4)
        given = {"mask": call.mask, "backend": "triton"}
        assert explain(attend, call.q.to(DEVICE), call.stored.view, **given).chosen == "triton"
        out, lse = call.solve()
        assert out.numel() == rows * 4 * 16
        assert lse.numel() == rows * 4
        assert not out.any()
        assert (lse == -torch.inf).all()


def test_wrong_numbers_on_the_device_stay_inside(plan, monkeypatch):
    """Faults 71, 76, 77: they change nobody else's rows, and nothing beside the results."""
    guarded = []

    def outputs(q, v):
        results = []
        for x in OUTPUTS(q, v):
            guard = torch.full((x.numel() + 2 * 4096,), 7.0, dtype=x.dtype, device=x.device)
            guarded.append((guard, x.numel()))
            results.append(guard[4096:-4096].view(x.shape))
        return tuple(results)

    monkeypatch.setattr(triton_cached, "outputs", outputs)
    most, least = 2**31 - 1, -(2**31)
    wrong = ({"lengths": most}, {"lengths": least}, {"starts": most}, {"starts": least, "table": most - 7})
    for counts, changes in ((1, wrong[:2]), ((1, 9, 3), wrong[2:])):
        call = store(SMALL, Sizes((5, 20, 9))).call(counts, 4)
        before = call.solve()
        for change in changes:
            tensors = {name: getattr(call.stored.view, name).clone() for name in change}
            for name, x in tensors.items():
                x[1] = change[name]
            after = call.over(**tensors).solve()
            for n in (0, 2):
                assert_same_bits(*zip(call.of(n, *before), call.of(n, *after), strict=True))
    offsets = ([0, 9, 4, 13], [5, 9, 11, 13], [0, -7, 12, 13], [0, 9, 1 << 30, 13], [99, 98, 97, 96])
    for n, wrong in enumerate((*offsets, offsets[1])):
        plan(is_split=n % 2 == 0, processors=1)
        call.over(cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32, device=DEVICE)).solve()
    for guard, n in guarded:
        assert guard[:4096].eq(7).all()
        assert guard[4096 + n :].eq(7).all()


OUTPUTS = triton_cached.outputs


def test_who_runs_a_call_and_what_the_operator_says(plan):
    """Whoever is named never falls back."""
    call = store(SMALL, Sizes((5,))).call(1, 4)
    q, view = call.q.to(DEVICE), call.stored.view
    assert explain(attend, q, view, mask=CAUSAL).chosen == "triton"
    assert replace(view) != view  # another view is of other tensors, and nothing is prepared for it
    with pytest.raises(NotImplementedError, match="no backward"):
        attend(q.clone().requires_grad_(), view, mask=CAUSAL, backend="triton")
    wide = store(KVLayout.grouped(2, 16, dtype=torch.float64), Sizes((5,))).call(1, 4)
    with pytest.raises(NotImplementedError, match="computes in fp32"):
        attend(wide.q.to(DEVICE), wide.stored.view, mask=CAUSAL, backend="triton")
    for layout, what in (
        (KVLayout.latent(576, 64), "heads of up to 576"),
        (KVLayout.grouped(1, 16, 513), "values of"),
    ):
        wide = store(layout, Sizes((5,))).call(1, 1)
        with pytest.raises(NotImplementedError, match=what):
            wide.solve()
    for layout, options in (
        (SMALL, ("sinks", "alibi_slopes")),
        (replace(LATENT, storage_dtype=torch.int8), ()),
    ):
        call = store(layout, Sizes((20, 3))).call((1, 2), 4, options=options)
        call = call.scheduled() if options else call
        options = {name: x.to(DEVICE) for name, x in call.options.items()}
        asked = Attention(call.q.to(DEVICE), CAUSAL, Score(0.25, None, **options), kv=call.stored.view)
        arguments = flat_over_view(checked(asked), call.stored.view.schedule)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.attnlib.triton_cached.default, arguments, test_utils=tests)


def test_descriptors_load_rows_without_gaps(monkeypatch):
    """And of multiples of 16 bytes; whatever else there is has addresses."""

    def tma(layout: KVLayout, page_size: int | None, order: str = "pages") -> bool:
        call = store(layout, Sizes((5,), page_size=page_size, order=order)).call(1, 32).scheduled()
        asked = checked(Attention(call.q.to(DEVICE), CAUSAL, kv=call.stored.view))
        arguments = flat_over_view(asked, call.stored.view.schedule)
        return bool(triton_cached.decode_plan(triton_cached.decode_key(arguments)).decode.blocks)

    plan_cache.cache_clear()
    monkeypatch.setattr(decode_shapes, "arch_of", lambda device: 90)
    wide = KVLayout.latent(512, 64, dtype=torch.float16)
    assert [tma(wide, page_size) for page_size in (1, 16, 64, 256, None)] == [False, False, True, True, True]
    assert not tma(wide, 64, "apart")
    assert not tma(replace(wide, dim=300, value_dim=300), 64)
    assert not tma(replace(wide, rope_dim=20), 64)
    # A contiguous cache has an odd number of tokens here, and so scales between 16 bytes.
    assert [tma(replace(wide, storage_dtype=torch.int8), page_size) for page_size in (16, 64, None)] == [
        False,
        True,
        False,
    ]
    plan_cache.cache_clear()


@torch.no_grad()
def test_a_compiled_step_is_one_graph(plan):
    """Of two layers, over several steps and a page boundary."""
    layouts, counter = (
        (replace(SMALL, storage_dtype=torch.int8), LATENT),
        CompileCounterWithBackend("aot_eager"),
    )
    caches = [KVCache.paged(layouts, pages=16, page_size=2, max_sequences=2, device=DEVICE) for _ in range(2)]

    def decode(layers, tensors, queries):
        views = layers[0].append(*tensors[:2]), layers[1].append(*tensors[2:])
        return [attend(q, kv, mask=CAUSAL, backend="triton") for q, kv in zip(queries, views, strict=True)]

    compiled = torch.compile(decode, backend=counter, fullgraph=True)
    for cache in caches:
        cache.admit(2)
    for _ in range(3):
        tensors = [torch.randn(2, 1, *widths, device=DEVICE) for widths in ((2, 16), (2, 16), (32,), (8,))]
        queries = [torch.randn(2, 1, 2, width, device=DEVICE) for width in (16, 40)]
        results = []
        for cache, run in zip(caches, (compiled, decode), strict=True):
            with cache.step(1) as layers:
                results.append(run(layers, tensors, queries))
        for ours, expected in zip(*results, strict=True):
            assert_same_bits(*zip(ours, expected, strict=True))
    assert counter.frame_count <= 2  # the first recorded the convention
    torch._dynamo.reset()
