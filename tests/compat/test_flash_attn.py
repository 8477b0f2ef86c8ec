"""The doors in flash-attn's signatures, against its rules written out."""

import random
from typing import NamedTuple

import pytest
import torch

import attnlib.compat.flash_attn as flash_attn
from attnlib import Rope, rotate
from attnlib.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input


class Options(NamedTuple):
    """What a call may say; the names are flash-attn's."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


def defined(q, k, v, options: Options, *, upcast=True, start: int = 0):
    """Attention ``[s, h, d]`` and LSE ``[h, s]`` of one sequence; in fp64, or else step by step in the
    dtype.
    """
    dtype = q.dtype
    if upcast:
        q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    scores = torch.einsum("shd,thd->hst", q * scale, k)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    i = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0], device=q.device)
    left, right = options.window_size
    right = 0 if options.causal else right
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(torch.float64 if upcast else torch.float32)
        scores = scores - (slopes[:, None, None] * (i - j).abs()).to(scores.dtype)
    shown = (j >= start) & (i == i)
    shown = shown & (j >= i - left) if left >= 0 else shown
    shown = shown & (j <= i + right) if right >= 0 else shown
    scores = scores.masked_fill(~shown, -torch.inf)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1).nan_to_num(0) if k.shape[0] else scores
    return torch.einsum("hst,thd->shd", p, v).to(torch.float64 if upcast else dtype), lse


def drawn(seed: int):
    """Sizes and options of flash-attn's own test grid, at sizes for a CPU."""
    rng = random.Random(seed)
    h, group = rng.choice([(6, 1), (6, 3), (6, 6), (9, 3)])
    s, t = rng.choice([(1, 17), (13, 13), (64, 51), (33, 64), (108, 64), (1, 1), (5, 97)])
    d = rng.choice([8, 32, 40, 59, 64, 96, 111, 128])
    window = rng.choice([(-1, -1), (-1, -1), (rng.randrange(t), rng.randrange(t)), (7, 0), (0, -1)])
    slopes = torch.rand(h) * 0.3 if rng.random() < 0.3 else None
    options = Options(
        rng.choice([None, 0.3]), rng.random() < 0.5, window, rng.choice([0.0, 0.0, 5.0]), slopes
    )
    return rng.choice([1, 2, 3]), s, t, h, h // group, d, options


def cases(count: int):
    return [pytest.param(n, marks=[] if n < 40 else pytest.mark.slow) for n in range(count)]


@pytest.mark.parametrize("seed", cases(300))
def test_flash_attentions_own_rule(seed):
    """An error at most twice that of eager attention in the dtype, of gradients three times, and exact in
    fp64.
    """
    b, s, t, h, g, d, options = drawn(seed)
    torch.manual_seed(seed)
    exact = [torch.randn(b, n, heads, d, dtype=torch.float64) for n, heads in ((s, h), (t, g), (t, g))]
    out, lse, nothing = flash_attn.flash_attn_func(*exact, **options._asdict(), return_attn_probs=True)
    for row, (q, k, v) in enumerate(zip(*exact, strict=True)):
        expected = defined(q, k, v, options)
        torch.testing.assert_close(out[row], expected[0], rtol=1e-9, atol=1e-9)
        wanted = expected[1].masked_fill(expected[1] == -torch.inf, torch.inf)
        torch.testing.assert_close(lse[row], wanted, rtol=1e-6, atol=1e-6)
    assert nothing is None
    keeps_the_rule(exact, options)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1000))
def test_flash_attentions_own_rule_on_a_gpu(seed):
    b, s, t, h, g, d, options = drawn(seed)
    torch.manual_seed(seed)
    exact = [torch.randn(b, n, heads, d, dtype=torch.float64).cuda() for n, heads in ((s, h), (t, g), (t, g))]
    slopes = None if options.alibi_slopes is None else options.alibi_slopes.cuda()
    keeps_the_rule(exact, options._replace(alibi_slopes=slopes))


def keeps_the_rule(exact, options):
    """In bf16, of attention and its gradients."""
    given = [x.bfloat16().requires_grad_() for x in exact]
    weights = torch.randn_like(given[0])
    results = {
        "ours": flash_attn.flash_attn_func(*given, **options._asdict()),
        "eager": torch.stack([defined(*row, options, upcast=False)[0] for row in zip(*given, strict=True)]),
        "exact": torch.stack([defined(*row, options)[0] for row in zip(*given, strict=True)]),
    }
    grads = {name: torch.autograd.grad(x, given, weights.to(x.dtype)) for name, x in results.items()}
    triples = [(*results.values(), 2), *((*three, 3) for three in zip(*grads.values(), strict=True))]
    for ours, eager, truth, factor in triples:
        error, allowed = ((x.double() - truth.double()).abs().max() for x in (ours, eager))
        assert error <= factor * allowed + 1e-2 * truth.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_packed_sequences(seed):
    """Each alone, with empty ones, and the same from pages."""
    _, _, _, h, g, d, options = drawn(seed)
    torch.manual_seed(seed)
    lengths_q, lengths_k = [3, 0, 17, 5], [11, 4, 17, 0]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v = (
        torch.randn(sum(n), heads, d).double()
        for n, heads in ((lengths_q, h), (lengths_k, g), (lengths_k, g))
    )
    sizes = (cu_q, cu_k, max(lengths_q), max(lengths_k))
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *sizes, **options._asdict(), return_attn_probs=True
    )
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    expected = [defined(*part, options) for part in parts]
    torch.testing.assert_close(out, torch.cat([x for x, _ in expected]), rtol=1e-9, atol=1e-9)
    wanted = torch.cat([x for _, x in expected], -1)
    torch.testing.assert_close(lse, wanted.masked_fill(wanted == -torch.inf, torch.inf), rtol=1e-6, atol=1e-6)
    pages, table = torch.full((2, 12, 8, g, d), torch.nan).double(), torch.randperm(12).int().view(4, 3)
    for plane, x in zip(pages, (k, v), strict=True):
        for row, part in enumerate(x.split(lengths_k)):
            for n, page in enumerate(part.split(8)):
                plane[table[row, n], : len(page)] = page
    from_pages = flash_attn.flash_attn_varlen_func(q, *pages, *sizes, **options._asdict(), block_table=table)
    torch.testing.assert_close(from_pages, out, rtol=1e-9, atol=1e-9)


def test_one_tensor_for_several():
    qkv = torch.randn(2, 9, 3, 4, 8)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), expected
    )
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 9, causal=True)
    torch.testing.assert_close(packed.unflatten(0, (2, 9)), expected)
    flat = qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 9, 9, causal=True)
    torch.testing.assert_close(packed.unflatten(0, (2, 9)), expected)


# Over a cache

KINDS = {
    "rows": {},
    "chosen rows": {"batch": True},
    "pages": {"paged": True},
    "padded on the left": {"leftpad": True},
    "padded pages": {"paged": True, "leftpad": True},
}


@pytest.mark.parametrize(
    ("new", "rotary"), [(0, None), *((n, x) for n in (1, 4) for x in (None, False, True))]
)
@pytest.mark.parametrize(
    "options", [Options(), Options(causal=True), Options(window_size=(5, 0), softcap=5.0)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_written_and_read(kind, options, new, rotary):
    torch.manual_seed(0)
    b, h, g, d, room, stored = 3, 4, 2, 16, 24, [5, 0, 17]
    queries = new or 2
    whole = torch.randn(2, b, room, g, d).double()  # keys and values of each sequence
    q, (k, v) = torch.randn(b, queries, h, d).double(), torch.randn(2, b, queries, g, d).double()
    lengths = torch.tensor(stored, dtype=torch.int32)
    given, starts = {"cache_seqlens": lengths}, [0] * b
    if KINDS[kind].get("leftpad"):
        starts = [2, 0, 9]
        given["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    if KINDS[kind].get("paged"):
        table = torch.randperm(12).int()[: b * 3].view(b, 3)
        cache = torch.full((2, 12, 8, g, d), torch.nan).double()
        cache[:, table.flatten()] = whole.view(2, b * 3, 8, g, d)
        given["block_table"] = table
    elif KINDS[kind].get("batch"):
        rows = torch.tensor([4, 0, 2], dtype=torch.int32)
        cache = torch.full((2, 5, room, g, d), torch.nan).double()
        cache[:, rows] = whole
        given["cache_batch_idx"] = rows
    else:
        cache = whole.clone()
    if rotary is not None:
        angles = Rope(d).angles(torch.arange(room))
        given |= {"rotary_cos": angles.cos, "rotary_sin": angles.sin, "rotary_interleaved": rotary}
    if new:
        given |= {"k": k, "v": v}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *cache, **given, **options._asdict(), return_softmax_lse=True
    )
    for row, length in enumerate(stored):
        after, keys, turned = length + new, k[row], q[row]
        if rotary is not None:
            rope, at = Rope(d, interleaved=rotary), torch.arange(queries) + length
            keys = rotate(keys, rope.angles(at))
            ordered = options.causal or options.window_size != (-1, -1)
            turned = rotate(turned, rope.angles(at if ordered else at * 0 + length))
        held = [torch.cat((x[row, :length], y[:new])) for x, y in zip(whole, (keys, v[row]), strict=True)]
        expected = defined(turned, *held, options, start=starts[row])
        torch.testing.assert_close(out[row], expected[0], rtol=1e-9, atol=1e-9)
        wanted = expected[1].masked_fill(expected[1] == -torch.inf, torch.inf)  # as flash-attn 2 writes it
        torch.testing.assert_close(lse[row], wanted, rtol=1e-6, atol=1e-6)
        if KINDS[kind].get("paged"):
            read = cache[:, given["block_table"][row]].flatten(1, 2)
        else:
            read = cache[:, given.get("cache_batch_idx", range(b))[row]]
        torch.testing.assert_close(read[:, :after], torch.stack(held), rtol=1e-12, atol=1e-12)
        assert torch.equal(read[:, after:], whole[:, row, after:])


def test_padding_is_taken_out_and_put_back():
    x, mask = torch.randn(3, 5, 2), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    packed, indices, cu, longest, used = unpad_input(x, mask)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 8, 8], 5, [3, 5, 0])
    assert torch.equal(packed, x[mask.bool()])
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), packed)
    assert torch.equal(pad_input(packed, indices, 3, 5), x * mask[..., None])
    more = unpad_input(x, mask, torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [0] * 5]))
    assert (more[2].tolist(), more[4].tolist()) == ([0, 4, 9, 9], [3, 5, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.ones(1, 1, 2, 8)}, ValueError, "k, v: expected both or neither"),
        (
            {"k": torch.ones(1, 1, 2, 8), "v": torch.ones(1, 1, 2, 8)},
            ValueError,
            "and cache_seqlens with them",
        ),
        ({"rotary_cos": torch.ones(8, 4)}, ValueError, "rotary_cos: expected new keys"),
        ({"softmax_scale": -1.0}, ValueError, "scale: expected a finite fp32 number above 0"),
    ],
)
def test_what_a_cache_refuses(change, error, message):
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_with_kvcache(*(torch.ones(1, n, 2, 8) for n in (1, 8, 8)), **change)


def test_a_deterministic_backward_is_asked_of_torch():
    q, before = torch.randn(1, 3, 2, 8), torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        with pytest.raises(NotImplementedError, match="use_deterministic_algorithms"):
            flash_attn.flash_attn_func(q, q, q, deterministic=True)
        torch.use_deterministic_algorithms(True)
        assert flash_attn.flash_attn_func(q, q, q, deterministic=True).shape == q.shape
    finally:
        torch.use_deterministic_algorithms(before)
