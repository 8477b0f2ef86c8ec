"""The kernels for selected keys of a cache, against the torch backend in fp64, and the laws of lists."""

from dataclasses import replace
from itertools import cycle, islice
from types import SimpleNamespace

import pytest
import torch
from compiled.builds import pairwise
from decode_helpers import Call, Sizes, moved_pages, near, plan_for, store
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from selected_cases import lists
from torch import Tensor

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    Mask,
    attention_with_lse,
    explain,
    masks,
    scores,
    sliding,
)
from attnlib import cached_attention_with_lse as attend
from attnlib.backends._torch.implementations import cached
from attnlib.backends._triton import backend
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends.operators import flat_over_view
from attnlib.call.call import Call as Attention
from attnlib.call.call import checked
from attnlib.masks import selected

WINDOW = 9 if INTERPRETED else 70
FACTORS = {
    "layout": ((2, 16, 16), (1, 59, 24), (1, 32, 48), (64, 16), (32, 0)),  # (g, d, e), or (rank, rope)
    "group": (2, 1, 20),
    # Lists ("g" for each KV head, "h" for each query head, or one for all), entries, and keys of a block:
    # blocks of a tile, of many and of half of one; tokens; and blocks that are no power of two.
    "form": (("g", 4, 16), ("one", 40, 1), ("h", 3, 32), ("g", 12, 4), ("one", 3, 24)),
    "page": (16, 4, 24, None),
    "lengths": ("edges", "ragged"),
    "queries": (1, 5, (1, 1, 1), (0, 1, 3)),
    "bounds": ("none", "padding", "window"),
    "mask": (CAUSAL, sliding(WINDOW), Mask(None, 0, 9), Mask(7, 3), CAUSAL & masks.dilated(2)),
    "options": ((), ("softcap",), ("alibi_slopes", "sinks"), ("per_sequence_slopes", "scale")),
    "store": (None, torch.int8, torch.float8_e4m3fn),
    "dtype": (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,)),
    "processors": (2, 500),  # few, for lists without splits, or many
}
if not INTERPRETED:
    FACTORS |= {
        "layout": ((8, 128, 128), (2, 64, 64), (1, 59, 24), (2, 192, 128), (1, 256, 256), (512, 64), (64, 0)),
        "group": (1, 4, 128),
        "form": (("g", 6, 64), ("one", 300, 1), ("h", 5, 128), ("g", 12, 32), ("one", 9, 100)),
        "page": (64, 1, 16, 256, 24, None),
        "queries": (1, 17, (1, 1, 1), (0, 1, 3)),
        "processors": (2, None),
    }
CASES = pairwise(FACTORS)
SMALL, LATENT = KVLayout.grouped(2, 16), KVLayout.latent(64, 16)
RAGGED = (50, 0, 19) if INTERPRETED else (700, 0, 129, 127, 128)

# numpy's, of NaN inputs
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:RuntimeWarning") for text in ("invalid value", "All-NaN")
]


@pytest.fixture
def plan(monkeypatch):
    """Plans as they ship, or on the interpreter with small tiles; call it for a device of other size."""

    def anew(processors: int | None = None, tiles: LaunchConfig | None = None):
        tiles = tiles or (LaunchConfig(16, 16, 2, 4) if INTERPRETED else None)
        monkeypatch.setattr(decode_tables, "LEAST_SELECTED", 16)
        plan_for(monkeypatch, tiles=tiles, processors=processors)

    anew()
    yield anew
    monkeypatch.undo()
    plan_for(monkeypatch)


def listed(call: Call, form: tuple[str, int, int], seed: int = 0) -> Tensor:
    """Lists for a call: of repeats, -1, blocks that do not exist, and empty lists."""
    (kind, n, size), (*rows, h, _) = form, call.q.shape
    c = {"g": call.stored.view.layout.heads, "h": h, "one": 1}[kind]
    blocks = -(-max(len(k) for k, _ in call.stored.tokens) // size)
    return lists(1, max(1, torch.Size(rows).numel()), c, n, blocks, seed=seed).reshape(*rows, c, n)


def solved(call: Call, indices: Tensor, size: int, backend: str = "triton") -> tuple[Tensor, Tensor]:
    """The output and LSE of a call by a backend, on the CPU; torch's are computed there too."""
    view, move = (call.stored.view, DEVICE) if backend == "triton" else (near(call.stored.view), "cpu")
    options = {name: x.to(move) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    mask = call.mask & selected(indices.to(move), size)
    return tuple(x.cpu() for x in attend(call.q.to(move), view, mask=mask, backend=backend, **options))


def exact(call: Call, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The output and LSE in fp64, of each sequence without a cache."""
    out = call.q.new_zeros(*call.q.shape[:-1], call.stored.view.layout.value_dim, dtype=torch.float64)
    lse = torch.full((*call.q.shape[:-3], *call.q.shape[-3:-1][::-1]), -torch.inf, dtype=torch.float64)
    of_lists = indices.flatten(-2).transpose(-1, -2)  # in the form of an LSE, so that call.of() can part it
    for n, problem in enumerate(call.problems()):
        own_out, own_lse = call.of(n, out, lse)
        _, own = call.of(n, out, of_lists)
        own = own.transpose(1, 2).unflatten(-1, indices.shape[-2:])
        options = problem.options | {"key_starts": problem.options["key_starts"].int()}
        found = attention_with_lse(
            *problem.tensors, mask=call.mask & selected(own, size), backend="torch", **options
        )
        own_out.copy_(found[0])
        own_lse.copy_(found[1])
    return out, lse


def assert_right(call: Call, indices: Tensor, size: int) -> None:
    """The error against fp64 is at most twice that of the torch backend in the same dtype."""
    results = (solved(call, indices, size, x) for x in ("triton", "torch"))
    largest = max((one.change(mask=FULL).largest_score() for one in call.problems()), default=0.0)
    for ours, theirs, right in zip(*results, exact(call, indices, size), strict=True):
        assert torch.equal(ours == -torch.inf, right == -torch.inf)
        assert ours.dtype == theirs.dtype
        noise = 4 * torch.finfo(ours.dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
        noise *= max(1, right.nan_to_num(0, 0, 0).abs().max().item())
        ours, theirs, right = (x.double().nan_to_num(torch.nan, 0, 0) for x in (ours, theirs, right))
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + noise


def call_of(case: SimpleNamespace) -> Call:
    numbers = {"dtype": case.dtype, "storage_dtype": case.store}
    numbers["window"] = WINDOW if case.bounds == "window" else None
    layout = (KVLayout.latent if len(case.layout) == 2 else KVLayout.grouped)(*case.layout, **numbers)
    page = case.page or 32
    lengths = {"edges": (0, 1, page - 1, page, page + 1), "ragged": RAGGED}[case.lengths]
    counts = [case.queries] * len(lengths)
    if not isinstance(case.queries, int):
        case.queries = counts = list(islice(cycle(case.queries), len(lengths)))
    starts = {"none": (), "padding": [length // 3 for length in lengths]}.get(case.bounds)
    mask = case.mask
    if case.bounds == "window":  # dropped pages, those of a contiguous cache excepted
        reach = [max(0, n - count - WINDOW + 1) for n, count in zip(lengths, counts, strict=True)]
        starts = () if case.page is None else [n // page * page for n in reach]
        mask = mask if isinstance(mask, Mask) and mask.left in (7, WINDOW - 1) else sliding(WINDOW)
    stored = store(layout, Sizes(lengths, starts, case.page))
    heads = max(1, case.group // layout.heads) * layout.heads if case.group > 4 else case.group * layout.heads
    return stored.call(case.queries, heads, mask, case.options)


@pytest.mark.parametrize("given", CASES, ids=lambda x: "-".join(map(str, x.values())))
def test_any_call(given, plan):
    case = SimpleNamespace(**given)
    plan(case.processors)
    call = call_of(case)
    assert_right(call, listed(call, case.form), case.form[2])


def test_order_and_repeats_of_a_list_change_no_bit(plan):
    for layout, form in ((SMALL, ("g", 9, 4)), (replace(LATENT, storage_dtype=torch.int8), ("one", 30, 1))):
        call = store(layout, Sizes((70, 41), page_size=4)).call(3, 4)
        indices = listed(call, form)
        results = [solved(call, x, form[2]) for x in (indices, indices.flip(-1), indices.repeat(1, 1, 1, 2))]
        for result in results[1:]:
            assert_same_bits(*zip(results[0], result, strict=True))


def test_keys_that_a_query_does_not_select_are_not_read(plan):
    """Whole pages of others, and others within a block that the band or the padding hides, are NaN."""
    for layout, mask, visible in ((SMALL, CAUSAL, 96), (LATENT, Mask(60, -3), 93)):
        call = store(layout, Sizes((96,), (40,), page_size=16)).call(1, 4, mask)
        indices = torch.tensor([5, 1, 2, -1, 5], dtype=torch.int32).expand(1, 1, 1, -1)  # tokens 40 on, 80 on
        expected, view = solved(call, indices, 16), call.stored.view
        at = torch.arange(96)
        hidden = at[((at >= 48) & (at < 80)) | (at >= visible)]
        for plane in (view.k, view.k_rope if layout.is_latent else view.v):
            plane[view.table[0, hidden // 16].long(), hidden % 16] = torch.nan
        assert_same_bits(*zip(expected, solved(call, indices, 16), strict=True))


def test_splits_pages_and_neighbours_make_no_difference(plan):
    """With lists that are split or not, tokens in other pages, and queries one by one."""
    form = ("g", 12, 8)
    for counts in (2, (2, 1, 4)):
        call = store(SMALL, Sizes((70, 33, 96), page_size=4)).call(counts, 4, options=("sinks",))
        indices = listed(call, form)
        results = []
        for processors in (1, 500):
            plan(processors)
            results.append(solved(call, indices, form[2]))
            assert_same_bits(*zip(results[-1], solved(moved_pages(call), indices, form[2]), strict=True))
        torch.testing.assert_close(*results)
        plan(1)
        view, (out, lse) = call.stored.view, results[0]
        own = call.of(1, indices, indices.transpose(0, -1))[0]
        one = {name: getattr(view, name)[1:2] for name in ("table", "starts", "lengths")}
        for last in range(own.shape[1]):  # in a view that ends with this query's own token
            end = view.lengths[1:2] - (own.shape[1] - 1 - last)
            alone = call.over(**one | {"lengths": end}, cu_seqlens_q=None)
            alone = replace(alone, q=call.of(1, call.q, lse)[0][:, last : last + 1], counts=1)
            found = solved(alone, own[:, last : last + 1], form[2])
            of_one = [x[:, last : last + 1] for x in call.of(1, out, lse.transpose(-1, -2))[:1]]
            assert_same_bits((found[0], of_one[0]))


def test_lists_of_all_keys_compute_what_none_do(plan):
    """Also lists that are longer than their sequence, and of blocks that are longer."""
    call = store(LATENT, Sizes((20, 37, 3), page_size=4)).call(2, 3, sliding(30), options=("alibi_slopes",))
    for n, size in ((60, 1), (5, 16), (1, 500)):
        indices = torch.randperm(n).int().expand(3, 2, 1, -1)
        torch.testing.assert_close(solved(call, indices, size), call.solve())


@pytest.mark.parametrize("n", [0, 1, 3])
def test_rows_that_select_nothing(n, plan):
    """Give 0, and the LSE of the sink if there is one."""
    for options, processors in (((), 1), (("sinks",), 500)):
        plan(processors)
        call = store(SMALL, Sizes((20, 3, 0), page_size=4)).call(2, 4, options=options)
        indices = torch.full((3, 2, 2, n), 2**31 - 1, dtype=torch.int32)
        if n == 3:
            indices[..., 0], indices[..., 1] = -1, 2  # of blocks of 16, which does not exist
        out, lse = solved(call, indices, 16)
        assert not out.any()
        sinks = call.options.get("sinks", torch.full((4,), -torch.inf))
        torch.testing.assert_close(lse, sinks[:, None].expand(3, 4, 2))


def test_score_functions(plan):
    call = store(SMALL, Sizes((40, 9), page_size=4)).call((3, 2), 4)
    indices = listed(call, ("h", 4, 8))
    score = scores.distance_bias(torch.randn(4, 20))
    call.options["score"] = score
    wanted = solved(call, indices, 8, "torch")
    call.options["score"] = score.reading([x.to(DEVICE) for x in score.tensors])
    torch.testing.assert_close(solved(call, indices, 8), wanted)


def test_steps_of_a_cache(plan):
    """A prompt, a token, drafts and a fork, after left padding, and of a window that drops pages."""
    window = KVLayout.grouped(2, 16, window=9)
    cache = KVCache.paged([SMALL, window], pages=60, page_size=4, max_sequences=4, device=DEVICE)
    first, _ = cache.admit(2, left_padding=[0, 5])
    for step, s in enumerate((31, 1, 3, 1)):
        if step == 3:
            cache.fork(first)
        with cache.step(s) as layers:
            b = layers[0].positions.shape[0]
            for kv, band in zip(layers, (CAUSAL, sliding(9)), strict=True):
                view = kv.append(*(torch.randn(b, s, 2, 16, device=DEVICE) for _ in "kv"))
                q, mask = torch.randn(b, s, 4, 16), band & selected(lists(b, s, 2, 6, 10, seed=step), 4)
                here = mask.band & selected(mask.selection.indices.to(DEVICE), 4)
                ours = attend(q.to(DEVICE), view, mask=here, backend="triton")
                wanted = attend(q, near(view), mask=mask, backend="reference")
                torch.testing.assert_close([x.cpu() for x in ours], [*wanted])


def test_a_call_reads_the_entries_that_its_lists_have_now(plan):
    """On the same tensors, view and queries, so that a cached call would be found."""
    view = store(replace(SMALL, dtype=torch.float16), Sizes((40,), page_size=4)).view
    q = torch.randn(1, 1, 4, 16, dtype=torch.float16, device=DEVICE)
    indices = torch.tensor([9, 1, 1, -1], device=DEVICE).int().expand(1, 1, 1, -1).contiguous()

    def run(indices, view):
        return attend(q, view, mask=CAUSAL & selected(indices, 4), backend="triton")

    for entries in ([9, 1, 1, -1], [0, 3, 5, 7], [0, 3, 5, -1]):
        indices.copy_(torch.tensor(entries))
        assert_same_bits(*zip(run(indices, view), run(indices.clone(), replace(view)), strict=True))


@pytest.mark.skipif(INTERPRETED, reason="captures a CUDA graph")
@pytest.mark.parametrize("processors", [1, 500])
def test_a_graph_takes_other_entries_and_lengths(processors, plan):
    plan(processors)
    call = store(replace(LATENT, storage_dtype=torch.int8), Sizes((700, 80), page_size=16)).call(2, 8)
    view, q = call.stored.view, call.q.to(DEVICE)
    indices = listed(call, ("one", 200, 1)).to(DEVICE)
    run = lambda: attend(q, view, mask=CAUSAL & selected(indices), backend="triton")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    indices.copy_(indices.flip(1) // 2)
    view.lengths.sub_(7)
    graph.replay()
    assert_same_bits(*zip(captured, run(), strict=True))


def test_a_chunk_counts_blocks_from_the_start_of_the_larger_call(plan):
    """Whose queries and keys begin elsewhere, so that blocks begin within tiles."""
    call = store(SMALL, Sizes((40, 23), page_size=4)).call(2, 4)
    results = []
    view = call.stored.view
    for run, kv, device in ((backend.cached.run, view, DEVICE), (cached, near(view), "cpu")):
        mask = CAUSAL & selected(lists(2, 2, 2, 3, 4).to(device), 16)
        given = flat_over_view(checked(Attention(call.q.to(device), mask, kv=kv)))
        origin = torch.tensor([[9, 7, 0, 0], [0, 21, 0, 3]], dtype=torch.int32, device=device)
        results.append([x.cpu() for x in run(*given._replace(origin=origin))])
    torch.testing.assert_close(*results)


def test_who_runs_a_call(plan):
    call = store(SMALL, Sizes((40,), page_size=4)).call(1, 4)
    mask, q = CAUSAL & selected(listed(call, ("g", 4, 4)).to(DEVICE), 4), call.q.to(DEVICE)
    found = explain(attend, q, call.stored.view, mask=mask)
    assert found.chosen == "triton"
    assert "plain" in str(found)


def test_tiles_and_splits_fit_heads_and_blocks():
    """A tile lies in one block if it can; lists are split if there are few queries."""
    case = decode_tables.DecodeCase(4, 128, 0, 128, 2, False, True, 64, 90, True)
    for size, tile in ((1, 64), (16, 64), (32, 32), (100, 64), (128, 64)):
        assert decode_tables.selected(case, block_size=size).block_n == tile
    tiles = decode_tables.selected(case, block_size=64)
    assert [decode_tables.list_splits(tiles, 1024, n, 132) for n in (8, 64, 500)] == [16, 4, 1]
    assert decode_tables.list_splits(tiles, 0, 8, 132) == 1
