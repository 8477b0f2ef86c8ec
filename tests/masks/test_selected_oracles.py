"""Selected keys by the definitions of other libraries, written down anew: they gather what lists name.

An entry that occurs twice counts twice there, so lists have each entry once.
"""

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention_with_lse,
    cached_attention_with_lse,
    mask_mod,
    merge_states,
    sliding,
)
from attnlib.masks import selected

BACKENDS = ("torch", "reference")


def distinct(rows: torch.Size, c: int, n: int, blocks: int) -> torch.Tensor:
    """Lists ``[*rows, c, n]`` of different entries in any order, some of which are -1."""
    order = torch.rand(*rows, c, blocks).argsort(-1)[..., :n].int()
    return order.masked_fill_(torch.rand(order.shape) < 0.2, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 8, 11])
def test_blocks_as_in_flash_linear_attention(size, backend):
    """``naive_nsa_selection``: every query gathers the keys of its blocks, and hides later ones."""
    torch.manual_seed(0)
    t, h, g, d = 50, 8, 2, 16
    q, k, v = (torch.randn(2, t, x, d, dtype=torch.float64, requires_grad=True) for x in (h, g, g))
    indices = distinct(torch.Size((2, t)), g, 4, -(-t // size))
    at = (indices.long()[..., None] * size + torch.arange(size)).flatten(-2)  # [b, t, g, n * size]
    hidden = (at < 0) | (at > torch.arange(t)[:, None, None])
    batch, head = torch.arange(2)[:, None, None, None], torch.arange(g)[:, None]
    keys, values = (x[batch, at.clamp(0, t - 1), head] for x in (k, v))  # [b, t, g, n * size, d]
    products = torch.einsum("btghd,btgnd->btghn", q.unflatten(2, (g, -1)), keys) * d**-0.5
    products = products.masked_fill(hidden[:, :, :, None], -torch.inf)
    weights = products.softmax(-1).nan_to_num(0)
    expected = torch.einsum("btghn,btgnd->btghd", weights, values).flatten(2, 3)

    out, lse = attention_with_lse(q, k, v, mask=CAUSAL & selected(indices, size), backend=backend)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.transpose(1, 2), products.logsumexp(-1).flatten(2).to(lse.dtype))
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * dout).sum(), (q, k, v)) for x in (out, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def gathered(q, latents, at, sinks, dim):
    """FlashMLA's reference: output and LSE of ``q [s, h, d]`` over latents ``[s, n, d]``, -1 for none.

    A sink takes its share of the output; here the LSE counts it, too.
    """
    products = torch.einsum("shd,snd->shn", q, latents) * q.shape[-1] ** -0.5
    products = products.masked_fill((at < 0)[:, None], -torch.inf)
    lse = torch.logaddexp(products.logsumexp(-1), sinks)
    return torch.einsum("shn,snd->shd", (products - lse[..., None]).exp(), latents[..., :dim]), lse


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_latents_as_in_flash_mla(backend):
    """``ref_sparse_attn_fwd``: no band, and sinks."""
    torch.manual_seed(0)
    q, latents = torch.randn(1, 9, 4, 24, dtype=torch.float64), torch.randn(1, 40, 1, 24, dtype=torch.float64)
    indices, sinks = distinct(torch.Size((1, 9)), 1, 12, 40), torch.randn(4, dtype=torch.float64)
    indices[0, 3] = -1
    at = indices[0, :, 0].long()
    expected, expected_lse = gathered(q[0], latents[0, at.clamp(min=0), 0], at, sinks, 16)
    values, mask = latents[..., :16], FULL & selected(indices)
    out, lse = attention_with_lse(q, latents, values, mask=mask, sinks=sinks, backend=backend)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(lse[0].T, expected_lse.to(lse.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_latents_as_in_flash_mla(backend):
    """``ref_sparse_attn_decode``: its entries are rows of all pages, where ours are tokens of a sequence."""
    torch.manual_seed(0)
    layout, size = KVLayout.latent(16, 8), 8
    cache = KVCache.paged([layout], pages=20, page_size=size, max_sequences=2)
    first, second = cache.admit(2)
    with cache.step({first: 50, second: 30}) as (layer,):
        layer.append(torch.randn(80, 16), torch.randn(80, 8))
    with cache.step(1) as (layer,):
        view = layer.append(torch.randn(2, 1, 16), torch.randn(2, 1, 8))
    q, sinks = torch.randn(2, 1, 4, 24), torch.randn(4)
    indices = distinct(torch.Size((2, 1)), 1, 10, 31)
    token = indices[:, 0, 0].long()
    page = view.table.gather(1, token.clamp(min=0) // size).long()
    rows = torch.where(token < 0, -1, page * size + token % size)
    stored = torch.cat((view.k, view.k_rope), -1).flatten(0, 2)  # [pages * size, d]
    expected, expected_lse = gathered(q[:, 0], stored[rows.clamp(min=0)], rows, sinks, 16)
    given = {"mask": CAUSAL & selected(indices), "sinks": sinks, "backend": backend}
    out, lse = cached_attention_with_lse(q, view, **given)
    torch.testing.assert_close(out[:, 0], expected)
    torch.testing.assert_close(lse[..., 0], expected_lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_and_selected_entries_as_in_attention_gym(backend):
    """``selected_attention``: one softmax, with sinks, over a window of own keys and entries of a pool."""
    torch.manual_seed(0)
    s, h, d, pool, window = 30, 4, 16, 20, 7
    q, own, others = (torch.randn(2, n, x, d, dtype=torch.float64) for n, x in ((s, h), (s, 1), (pool, 1)))
    q, own, others = (x.requires_grad_() for x in (q, own, others))
    sinks, document = torch.randn(h, dtype=torch.float64), torch.arange(s)[None].expand(2, -1) // 11
    indices = distinct(torch.Size((2, s)), 1, 6, pool)

    i, j = torch.arange(s)[:, None], torch.arange(s)
    near = (j <= i) & (j > i - window) & (document[:, :, None] == document[:, None])
    chosen = torch.zeros(2, s, pool + 1).scatter_(-1, indices[:, :, 0].long() % (pool + 1), 1)[..., :pool] > 0
    seen = torch.cat((chosen, near), -1)[:, None]
    keys = torch.cat((others, own), 1)[:, :, 0]
    products = torch.einsum("bshd,btd->bhst", q, keys) * d**-0.5
    products = torch.cat(
        (products.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(2, h, s, 1)), -1
    )
    expected = torch.einsum("bhst,btd->bshd", products.softmax(-1)[..., :-1], keys)

    same = mask_mod(lambda b, h, i, j, of: of[b, i] == of[b, j], document.int())
    parts = (
        attention_with_lse(q, own, own, mask=sliding(window) & same, sinks=sinks, backend=backend),
        attention_with_lse(q, others, others, mask=FULL & selected(indices), backend=backend),
    )
    out, _ = merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * dout).sum(), (q, own, others)) for x in (out, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
