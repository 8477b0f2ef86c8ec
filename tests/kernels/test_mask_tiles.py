"""Which tiles a mask by function hides, cuts or shows whole, and what kernels make of the lists of them."""

import pytest
import torch
from function_cases import MASK_NAMES, by_definition, close, functions, loss, narrow, tensors
from kernel_helpers import DEVICE

from attnlib import CAUSAL, FULL, attention, attention_with_lse, mask_mod, sliding, varlen_attention_with_lse
from attnlib.backends._triton import backend
from attnlib.backends._triton.dense import generic as passes
from attnlib.backends._triton.dense import hopper as variants
from attnlib.backends._triton.dense import mask_tiles, tables
from attnlib.backends._triton.dense.shapes import DenseShapes
from attnlib.backends._triton.functions.programs import captured
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends.operators import flat
from attnlib.call.call import Call, Packing, checked
from attnlib.masks.function import function_of

SIZES = [
    (16, 16, 16),
    (32, 16, 16),
    (16, 32, 16),
    (16, 16, 32),
]  # queries and keys of a tile, and of what is told apart


@pytest.fixture(autouse=True)
def _here():
    """Every tensor where kernels run."""
    with torch.device(DEVICE):
        yield


def lines(call: Call, block_m: int, block_n: int, *, by_keys: bool):
    """The lists of a call ``[b, h, blocks, numbers]``, or packed ``[h, blocks, numbers]``, and how many
    entries fit.
    """
    a = backend.dense._with_tiles(flat(checked(call)))
    x = DenseShapes(backend.dense._key(a))
    made = mask_tiles.lists(x, LaunchConfig(block_m, block_n, 1, 4), by_keys=by_keys)
    found = torch.full((made.numbers,), -1, dtype=torch.int32)
    made.launch.on(a._asdict() | captured(a) | {"states": a.mask_tiles, "lists": found})
    room, blocks = made.arguments["room"], x.blocks(x.t if by_keys else x.s, block_n if by_keys else block_m)
    return found.view(-1, blocks, room + 4), room


def told(line, room):
    """The cut tiles and the whole ones that a line lists, and how many cut ones lie before the first whole
    one.
    """
    before, cut, whole = line[:3].tolist()
    entries = line[4:].tolist()
    return entries[:cut], entries[::-1][:whole], before


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("small", SIZES, indirect=True, ids=str)
def test_lists_have_the_tiles_that_the_definition_has(small, name):
    from attnlib.backends._triton.kernels.mask_tiles import MOST

    block_m, block_n = small
    mask, (b, s, t, h, g) = functions(2, 4, 100)[0][name], (2, 70, 100, 4, 2)
    q, k, v = (torch.randn(b, n, heads, 16) for n, heads in ((s, h), (t, g), (t, g)))
    i, j = torch.arange(t - s, t)[:, None], torch.arange(t)
    at = torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None]
    seen = mask.visible(*at, i, j, torch.tensor(t - s)).broadcast_to(b, h, s, t)

    def classes(plane, m, n, by_keys):
        tile = plane[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        # What lies behind the last query or key is hidden from the block whose own it is not.
        inside = tile.shape[0] == block_m if by_keys else tile.shape[1] == block_n
        return "whole" if tile.all() and inside else "cut" if tile.any() else "hidden"

    for by_keys in (False, True):
        found, room = lines(Call(q, mask, k=k, v=v), block_m, block_n, by_keys=by_keys)
        heads = (g if by_keys else h) if name == "by head" else 1
        assert found.shape[0] == heads * (b if name == "documents" else 1)
        for plane in range(found.shape[0]):
            n_b, n_h = plane // heads, plane % heads
            for block, line in enumerate(found[plane]):
                cut, whole, before = told(line, room)
                assert cut == sorted(cut)
                assert whole == sorted(whole)
                assert before == (sum(n < whole[0] for n in cut) if whole else len(cut))
                tiles = -(-s // block_m)
                group = range(h // g) if by_keys else range(1)
                known = {}
                for member in group:
                    head = (n_h * len(group) + member) % h
                    for other in range(tiles if by_keys else -(-t // block_n)):
                        m, n = (other, block) if by_keys else (block, other)
                        kind = classes(seen[n_b, head], m, n, by_keys)
                        known.setdefault(kind, []).append(member * MOST.value + other)
                # Larger grains than tiles may call a whole tile cut, and one that is hidden; never the other
                # way.
                if min(small) >= tables.GRAIN:
                    assert (cut, whole) == (known.get("cut", []), known.get("whole", []))
                assert set(known.get("cut", [])) <= set(cut)
                assert set(whole) <= set(known.get("whole", []))
                assert set(known.get("whole", [])) <= {*cut, *whole}


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("small", SIZES, indirect=True, ids=str)
def test_many_tiles(small, name):
    mask = functions(2, 4, 100)[0][name]
    golden = tensors(s=70, t=100, d=16)
    leaves = narrow(*golden)
    ours = attention_with_lse(*leaves, mask=mask, backend="triton")
    theirs = by_definition(*golden, mask, None)
    close(ours, theirs)
    close(torch.autograd.grad(loss(*ours), leaves), torch.autograd.grad(loss(*theirs), golden))


@pytest.mark.parametrize("small", SIZES[:2], indirect=True, ids=str)
def test_bounds_of_sequences_cut_the_tiles(small):
    mask, golden = (
        sliding(50) & mask_mod(lambda b, h, i, j: (i - j) // 20 % 2 == 0),
        tensors(s=70, t=100, d=16),
    )
    leaves, options = narrow(*golden), {"mask": mask, "key_starts": torch.tensor([5, 40], dtype=torch.int32)}
    options["key_ends"] = torch.tensor([100, 61], dtype=torch.int32)
    ours = attention_with_lse(*leaves, **options, backend="triton")
    theirs = attention_with_lse(*golden, **options, backend="reference")
    close(ours, theirs)
    close(torch.autograd.grad(loss(*ours), leaves), torch.autograd.grad(loss(*theirs), golden))


@pytest.mark.parametrize("small", SIZES[:2], indirect=True, ids=str)
def test_packed_sequences_have_their_own_tiles(small):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 33, 33, 40, 90), (0, 50, 53, 60, 131)))
    mask = CAUSAL & mask_mod(lambda b, h, i, j: ((i - j) % 40 < 20) | ((b == 3) & (h > 1)))
    golden = [x[0].detach().requires_grad_() for x in tensors(1, 90, 131, d=16)]
    leaves, options = narrow(*golden), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "mask": mask}
    ours = varlen_attention_with_lse(*leaves, **options, backend="triton")
    theirs = varlen_attention_with_lse(*golden, **options, backend="reference")
    close(ours, theirs)
    close(torch.autograd.grad(loss(*ours), leaves), torch.autograd.grad(loss(*theirs), golden))
    assert Packing(cu_q, cu_k).read(queries=90, keys=131)


@pytest.mark.parametrize("band", [CAUSAL, sliding(37), FULL], ids=str)
@pytest.mark.parametrize("small", SIZES[:3], indirect=True, ids=str)
def test_a_mask_by_function_gives_the_bits_of_its_band(small, band):
    """It visits the same tiles in the same order, forward and backward."""
    leaves = narrow(*tensors(s=70, t=100, d=16))
    by_function = function_of(FULL, lambda b, h, i, j: band.visible(i, j), ())
    found = []
    for mask in (by_function, band):
        out = attention(*leaves, mask=mask, backend="triton:generic")
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", MASK_NAMES)
def test_tiles_found_before_are_those_of_kernels(name):
    """Within the band; outside it kernels call no function."""
    mask, (b, s, t, h) = functions(2, 4, 200)[0][name], (2, 130, 200, 4)
    q, k = torch.randn(b, s, h, 16), torch.randn(b, t, 2, 16)
    blocks = mask.block_mask(b, h, s, t)
    found = backend.dense._with_tiles(flat(checked(Call(q, mask, k=k, v=k)))).mask_tiles
    given = flat(checked(Call(q, blocks, k=k, v=k)))
    assert given.mask_tiles is blocks.tiles
    assert backend.dense._with_tiles(given).mask_tiles is blocks.tiles
    everywhere = mask.band.visible(torch.arange(t - s, t)[:, None], torch.arange(t)).float()
    inside = torch.nn.functional.max_pool2d(everywhere[None], 64, ceil_mode=True)[0] > 0
    assert torch.equal(found.where(inside, 0), blocks.tiles.where(inside, 0))
    assert torch.equal(*(attention(q, k, k, mask=x, backend="triton") for x in (mask, blocks)))


def test_a_mask_that_hides_most_is_small_work():
    """A window of 64 by function: of 1024 keys each block of queries visits two or three of 64."""
    q = torch.randn(1, 1024, 1, 16)
    narrow_window = function_of(FULL, lambda b, h, i, j: (j <= i) & (i - j < 64), ())
    found, room = lines(Call(q, narrow_window, k=q, v=q), 64, 64, by_keys=False)
    assert [len(told(line, room)[0]) for line in found[0]] == [1] + [2] * 15
    key = backend.dense._key(flat(checked(Call(q, narrow_window, k=q, v=q))))
    assert variants.states(key)[1] == (1, 1, 16, 16)
    assert passes.forward(DenseShapes(key))[1] == 16 * (4 + 16)
