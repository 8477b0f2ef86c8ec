"""Trees of sequences in kernels: tiles told apart from bounds of ends and depths, and attention over them."""

import random
from dataclasses import replace

import pytest
import torch
from function_cases import close, loss, narrow, tensors
from kernel_helpers import DEVICE
from tree_cases import OPTIONS, drawn_sequences, trees

from attnlib import CAUSAL, attention_with_lse, masks, scores, sliding, varlen_attention_with_lse
from attnlib.backends._triton import backend
from attnlib.backends._triton.dense import hopper as variants
from attnlib.backends._triton.dense import mask_tiles, tables
from attnlib.backends._triton.dense.shapes import DenseShapes
from attnlib.backends._triton.functions.programs import captured
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.backends.operators import flat
from attnlib.call.call import Call, Packing, checked

# queries and keys of a tile, and tokens of which bounds are known
SIZES = [(16, 16, 16), (32, 16, 16), (16, 32, 16), (16, 16, 32)]
WINDOWS = {"no window": CAUSAL, "a short window": sliding(5), "a long window": sliding(40)}


@pytest.fixture(autouse=True)
def _here():
    """Every tensor where kernels run."""
    with torch.device(DEVICE):
        yield


def random_trees(count: int, seed: int):
    """Ends and positions of some trees of up to 100 tokens or so, with padding."""
    numbers = random.Random(seed)
    _, ends, positions = trees(
        *([*drawn_sequences(lambda n: numbers.randint(0, n), 18), [7] * 12] for _ in range(count))
    )
    return ends.to(DEVICE), positions.to(DEVICE)


def general(mask):
    """The same mask, whose tiles are classified by calling its function."""
    return replace(mask, tree=mask.tree._replace(is_alone=False))


def both(call, small, monkeypatch, *, by_keys):
    """The lists of a tree, and those of its function, for which states of the smallest tiles are exact."""
    ours, grain = lines(call, *small, by_keys=by_keys), tables.GRAIN
    with monkeypatch.context() as patch:
        plan_cache.cache_clear()
        patch.setattr(tables, "GRAIN", 16)
        theirs = lines(call._replace(mask=general(call.mask)), *small, by_keys=by_keys)
    plan_cache.cache_clear()
    assert grain == tables.GRAIN
    return ours, theirs


def lines(call: Call, block_m: int, block_n: int, *, by_keys: bool):
    """For each list of a call: the partial tiles, the full ones, and all that are visited."""
    a = backend.dense._with_tiles(flat(checked(call)))
    x = DenseShapes(backend.dense._key(a))
    made = mask_tiles.lists(x, LaunchConfig(block_m, block_n, 1, 4), by_keys=by_keys)
    lists = torch.full((made.numbers,), -1, dtype=torch.int32)
    made.launch.on(a._asdict() | captured(a) | {"states": a.mask_tiles, "lists": lists})
    found = []
    for line in lists.view(-1, made.arguments["room"] + 4).tolist():
        before, cut, whole = line[:3]
        cuts, wholes = line[4 : 4 + cut], line[::-1][:whole]
        assert before == (sum(n < wholes[0] for n in cuts) if wholes else cut) or before == -1
        found.append((cuts, wholes))
    return found


def compare(ours, theirs, *, is_exact: bool):
    """No visible tile is missing, and none is full that is not; where bounds are exact, lists are equal."""
    assert len(ours) == len(theirs)
    for (cut, whole), (their_cut, their_whole) in zip(ours, theirs, strict=True):
        if is_exact:
            assert (cut, whole) == (their_cut, their_whole)
        assert {*their_cut, *their_whole} <= {*cut, *whole}
        assert {*whole} <= {*their_whole}


@pytest.mark.covering(2)
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("small", SIZES, indirect=True, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_lists_of_dense_trees(name, small, by_keys, monkeypatch):
    visited = []
    for seed in range(3):
        ends, positions = random_trees(2, seed)
        b, t = ends.shape
        for skipped in (0, 3) if t > 3 else (0,):  # the last queries alone, whose tiles begin between two
            q, k = torch.randn(b, t - skipped, 4, 16), torch.randn(b, t, 2, 16)
            mask = masks.until(ends, positions) & WINDOWS[name]
            found = both(Call(q, mask, k=k, v=k), small, monkeypatch, by_keys=by_keys)
            is_exact = name == "no window" and not (ends == 0).any() and tables.GRAIN == 16
            is_exact = is_exact and not skipped
            compare(*found, is_exact=is_exact)
            visited.append([sum(len(x) + len(y) for x, y in every) for every in found])
    ours, theirs = map(sum, zip(*visited, strict=True))
    assert tables.GRAIN > 16 or ours <= 1.25 * theirs, (ours, theirs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("small", SIZES, indirect=True, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("form", ["[t]", "[b, t]"])
def test_lists_of_packed_trees(form, name, small, by_keys, monkeypatch):
    for seed in range(2):
        ends, positions = random_trees(3, seed)
        lengths = torch.tensor([int((x > 0).sum()) for x in ends])
        cu = torch.cat((lengths[:1] * 0, lengths.cumsum(0))).int()
        if form == "[t]":
            ends, positions = (x[ends > 0] for x in (ends, positions))
        q, k = torch.randn(int(cu[-1]), 4, 16), torch.randn(int(cu[-1]), 2, 16)
        mask = masks.until(ends, positions) & WINDOWS[name]
        call = Call(q, mask, k=k, v=k, packing=Packing(cu, cu))
        found = both(call, small, monkeypatch, by_keys=by_keys)
        compare(*found, is_exact=name == "no window" and tables.GRAIN == 16)


def almost_seen(changed: dict[int, int], ending: int):
    """A chain of 64 tokens that ends before its last rows, some ends of which are others."""
    ends = torch.tensor([ending] * ending + [64] * (64 - ending))
    for row, end in changed.items():
        ends[row] = end
    return ends[None].to(DEVICE)


ALMOST = {
    "the last row of a tile": ({}, 47, 0),
    "padding among queries": ({40: 0}, 64, 0),
    "padding in the second tile that queries touch": ({49: 0}, 64, 3),
    "padding among keys": ({5: 0}, 64, 0),
    "a leaf among keys": ({5: 6}, 64, 0),
}


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", ALMOST)
@pytest.mark.parametrize("small", SIZES[:1], indirect=True, ids=str)
def test_a_row_that_does_not_see_a_key_makes_its_tile_partial(small, name, by_keys, monkeypatch):
    changed, ending, skipped = ALMOST[name]
    q, k = torch.randn(1, 64 - skipped, 2, 16), torch.randn(1, 64, 2, 16)
    mask = masks.until(almost_seen(changed, ending))
    found = both(Call(q, mask, k=k, v=k), small, monkeypatch, by_keys=by_keys)
    compare(*found, is_exact=not changed)
    assert sum(len(whole) for _, whole in found[0]) < 6 - bool(skipped)  # of all tiles before the diagonal


def test_a_launch_does_not_depend_on_lengths():
    """The kernels that find tiles have no constants that change with the length or the window."""
    constants = []
    for t, window in ((90, 5), (300, 9)):
        ends = torch.full((2, t), t, dtype=torch.int32)
        q = torch.randn(2, t, 1, 16)
        call = Call(q, masks.until(ends, ends) & sliding(window), k=q, v=q)
        key = backend.dense._key(flat(checked(call)))
        launches = (
            variants.states(key)[0],
            mask_tiles.lists(DenseShapes(key), LaunchConfig(64, 64, 1, 4), by_keys=False).launch,
        )
        constants.append([{n: x for n, x in launch.arguments.items() if n.isupper()} for launch in launches])
        assert variants.states(key)[1] == (2, 1, 4, -(-t // 64))
    assert constants[0] == constants[1]


def test_a_list_holds_a_prompt_and_its_answer():
    """Of 8 answers behind a prompt, each sees the prompt and itself: 5 tiles of 64, instead of up to 12."""
    ends = torch.tensor([768] * 256 + [256 + 64 * (n + 1) for n in range(8) for _ in range(64)])
    q = torch.randn(1, 768, 1, 16)
    found = lines(Call(q, masks.until(ends), k=q, v=q), 64, 64, by_keys=False)
    assert [len(cut) + len(whole) for cut, whole in found] == [1, 2, 3, 4, *[5] * 8]
    assert [whole for _, whole in found[4:]] == [[0, 1, 2, 3]] * 8


@pytest.mark.parametrize("name", ["a window", "keys before", "either", "sinks", "alibi and a bias"])
@pytest.mark.parametrize("small", SIZES[:1], indirect=True, ids=str)
def test_dense_trees(small, name):
    options, (ends, positions) = OPTIONS[name], random_trees(2, 3)
    b, t = ends.shape
    golden = [*tensors(b, t, t, d=16), *(x.to(DEVICE).detach().requires_grad_() for x in options.leaves())]
    mask = masks.until(ends, positions) & options.mask
    assert_as_reference(attention_with_lse, golden, mask, options)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["plain", "a window", "alibi and a bias"])
@pytest.mark.parametrize("form", ["[t]", "[b, t]"])
@pytest.mark.parametrize("small", SIZES[1:3], indirect=True, ids=str)
def test_packed_trees(small, form, name):
    options, (ends, positions) = OPTIONS[name], random_trees(3, 5)
    lengths = torch.tensor([int((x > 0).sum()) for x in ends])
    cu = torch.cat((lengths[:1] * 0, lengths.cumsum(0))).int()
    if form == "[t]":
        ends, positions = (x[ends > 0] for x in (ends, positions))
    qkv = [x[0].detach().requires_grad_() for x in tensors(1, int(cu[-1]), int(cu[-1]), d=16)]
    golden = [*qkv, *(x.to(DEVICE).detach().requires_grad_() for x in options.leaves())]
    mask = masks.until(ends, positions) & options.mask
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert_as_reference(varlen_attention_with_lse, golden, mask, options, **packing)


def assert_as_reference(run, golden, mask, options, **more):
    leaves = narrow(*golden)
    ours = run(*leaves[:3], mask=mask, **options.arguments(leaves[3:]), **more, backend="triton")
    theirs = run(*golden[:3], mask=mask, **options.arguments(golden[3:]), **more, backend="reference")
    close(ours, theirs)
    close(torch.autograd.grad(loss(*ours), leaves), torch.autograd.grad(loss(*theirs), golden))


@pytest.mark.parametrize("small", SIZES[:2], indirect=True, ids=str)
def test_bounds_of_sequences_and_slopes_of_each(small):
    ends, positions = random_trees(2, 4)
    b, t = ends.shape
    golden = [*tensors(b, t, t, d=16), torch.rand(b, 4, dtype=torch.float64, requires_grad=True)]
    leaves, mask = narrow(*golden), masks.until(ends, positions) & sliding(20)
    bounds = {"key_starts": torch.tensor([5, 0]).int(), "key_ends": torch.tensor([t, t - 9]).int()}
    ours, theirs = (
        attention_with_lse(*x[:3], mask=mask, alibi_slopes=x[3], **bounds, backend=name)
        for x, name in ((leaves, "triton"), (golden, "reference"))
    )
    close(ours, theirs)
    close(torch.autograd.grad(loss(*ours), leaves), torch.autograd.grad(loss(*theirs), golden))


@pytest.mark.parametrize("small", SIZES[:1], indirect=True, ids=str)
def test_a_tree_gives_the_bits_of_its_function(small):
    """Without windows and padding it visits the same tiles in the same order, forward and backward."""
    ends, positions = random_trees(1, 8)
    leaves, found = narrow(*tensors(1, ends.shape[1], ends.shape[1], d=16)), []
    mask = masks.until(ends, positions)
    for x in (mask, general(mask)):
        out, _ = attention_with_lse(*leaves, mask=x, backend="triton:generic")
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_tiles_of_block_mask_are_used():
    ends, positions = random_trees(2, 6)
    b, t = ends.shape
    q = torch.randn(b, t, 4, 16)
    mask = masks.until(ends, positions) & sliding(9)
    blocks = mask.block_mask(b, 4, t, t)
    assert flat(checked(Call(q, blocks, k=q, v=q))).mask_tree is None
    assert flat(checked(Call(q, mask, k=q, v=q))).mask_tree == "0 1 None True 8"
    ours = attention_with_lse(q, q, q, mask=blocks, backend="triton")
    torch.testing.assert_close(ours, attention_with_lse(q, q, q, mask=mask, backend="triton"))


def test_a_tree_with_another_function_is_classified_by_calling_it():
    ends, positions = random_trees(1, 2)
    q = torch.randn(1, ends.shape[1], 2, 16)
    for mask in (
        masks.until(ends, positions) & masks.dilated(2),
        masks.chunked(4) & masks.until(ends, positions),
    ):
        a = backend.dense._with_tiles(flat(checked(Call(q, mask, k=q, v=q))))
        assert a.mask_tree is None
        assert a.mask_tiles.dtype == torch.int8
    bias = scores.distance_bias(torch.zeros(2, 4))
    score = Call(q, masks.until(ends, positions), k=q, v=q).score._replace(function=bias)
    assert flat(checked(Call(q, masks.until(ends, positions), score, q, q))).mask_tree is not None
