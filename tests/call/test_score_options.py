"""Calls take the softcap and the ALiBi of their score function as options, and compute the same."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_bits

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    attention,
    attention_maxima,
    attention_weights,
    attention_with_lse,
    cached_attention_with_lse,
    explain,
    mask_mod,
    masks,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.call.call import Call, Origin, Score
from attnlib.call.score_options import with_score_options
from attnlib.dispatch.run import attend
from attnlib.dispatch.select import CALL_CACHE
from attnlib.tracing import score_options as analysis

B, S, T, H, G, D = 2, 9, 13, 4, 2, 8
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])


def capped(s, b, h, i, j):
    return 3 * torch.tanh(s / 3)


def sloped(s, b, h, i, j, m):
    return s - m[h] * (i - j).abs()


def behind(s, b, h, i, j, m):
    return s + m[h] * (j - i)


def by_head(s, b, h, i, j):
    return s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i)


def by_sequence(s, b, h, i, j, m):
    return s - m[b, h] * (i - j).abs()


def everything(s, b, h, i, j, m, x):
    return torch.tanh(s / 3) * 3 + m[h] * (j - i) + x[h, (i - j).clamp(0, 4)]


def slopes(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)  # about half of them are negative


def functions(*, grad=False):
    return {
        "capped": score_mod(capped),
        "sloped": score_mod(sloped, slopes(H, grad=grad)),
        "behind": score_mod(behind, slopes(H, grad=grad)),
        "by head": score_mod(by_head),
        "by sequence": score_mod(by_sequence, slopes(B, H, grad=grad)),
        "everything": score_mod(everything, slopes(H, grad=grad), slopes(H, 5, grad=grad)),
    }


NAMES = pytest.mark.parametrize("name", functions())


def whole(function):
    """The same function, whose options are not known."""
    return replace(function, contained=None)


def tensors(*, grad=False):
    shapes = (B, S, H, D), (B, T, G, D), (B, T, G, D)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]


def options_of(function, mask=CAUSAL, *, call=None, **options):
    """The names of the options of a call once it has taken those of its function."""
    q, k, v = tensors()
    call = Call(q, mask, Score(function=function, **options), k, v) if call is None else call
    return with_score_options(call).score.options


def alike(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@NAMES
@BACKENDS
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(4), Mask(3, 2), Mask(None, -1)], ids=str)
def test_dense_calls(mask, backend, name):
    function, given = functions()[name], tensors()
    both = (
        attention_with_lse(*given, mask=mask, score=x, backend=backend) for x in (function, whole(function))
    )
    alike(*both)


@NAMES
def test_which_options_a_call_takes(name):
    function = functions()[name]
    expected = {
        "capped": ("softcap",),
        "everything": ("softcap", "alibi_slopes", "function"),
    }.get(name, ("alibi_slopes",))
    assert options_of(function) == expected
    assert options_of(whole(function)) == ("function",)


@pytest.mark.parametrize(
    ("mask", "is_behind"),
    [
        (CAUSAL, True), (sliding(3), True), (CAUSAL.shift(-2), True), (CAUSAL.shift(1), False), (FULL, False),
        (Mask(right=0, prefix=1), False), (Mask(left=3), False),
        (CAUSAL & mask_mod(lambda b, h, i, j: j % 2 == 0), True),
        (mask_mod(lambda b, h, i, j: (j <= i) & (j % 2 == 0)), True),
        (mask_mod(lambda b, h, i, j: (j <= i) | (j % 2 == 0)), False),
        (masks.documents(torch.zeros(B, T, dtype=torch.int32)), False),
    ],
)  # fmt: skip
def test_a_bias_without_abs_needs_a_mask_that_hides_keys_after_the_query(mask, is_behind):
    assert options_of(functions()["behind"], mask) == (("alibi_slopes",) if is_behind else ("function",))
    assert options_of(functions()["sloped"], mask) == ("alibi_slopes",)
    softcap = ("softcap", "alibi_slopes", "function") if is_behind else ("softcap", "function")
    assert options_of(functions()["everything"], mask) == softcap


def test_options_keep_their_order():
    given = functions()
    assert options_of(given["capped"], softcap=2.0) == ("softcap", "function")
    assert options_of(given["capped"], alibi_slopes=slopes(H)) == ("alibi_slopes", "function")
    assert options_of(given["sloped"], alibi_slopes=slopes(H)) == ("alibi_slopes", "function")
    assert options_of(given["everything"], softcap=2.0) == ("softcap", "function")
    assert options_of(given["sloped"], softcap=2.0, sinks=slopes(H)) == ("softcap", "alibi_slopes", "sinks")
    q, k, v = tensors()
    for name in ("capped", "sloped", "everything"):
        for options in ({"softcap": 2.0}, {"alibi_slopes": slopes(H)}, {"softcap": 2.0, "sinks": slopes(H)}):
            options |= {"mask": CAUSAL}
            both = (
                attention_with_lse(q, k, v, score=x, **options) for x in (given[name], whole(given[name]))
            )
            alike(*both)


def test_slopes_by_a_formula_of_the_head():
    """Negative and infinite ones stay in the function; the others are made once for a device."""
    for formula, is_option in (
        (lambda s, b, h, i, j: s - 0.5 * (i - j), True),
        (lambda s, b, h, i, j: s + 0.5 * (i - j), False),
        (lambda s, b, h, i, j: s - (h - 1.5) * (i - j), False),
        (lambda s, b, h, i, j: s - torch.exp2(-h) * (i - j), True),
        (lambda s, b, h, i, j: s - torch.exp(1000.0 * torch.exp(h.float())) * (i - j), False),
    ):
        x = score_mod(formula)
        assert options_of(x) == (("alibi_slopes",) if is_option else ("function",))
        assert options_of(x, FULL) == ("function",)
    q, k, v = tensors()
    function = score_mod(by_head)
    calls = [Call(y, CAUSAL, Score(function=function), k, v) for y in (q, q, q.float())]
    first, again, other = (with_score_options(call).score.alibi_slopes for call in calls)
    assert first is again
    assert (first.dtype, other.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(first, 2.0 ** -(torch.arange(1, H + 1).double() * 8 / H))
    assert len(function.computed) == 2
    assert not copy.deepcopy(function).computed
    with torch.inference_mode():
        attention(q, k, v, mask=CAUSAL, score=score_mod(formula))
    q.requires_grad_()
    attention(q, k, v, mask=CAUSAL, score=score_mod(formula)).sum().backward()
    mode = torch._subclasses.FakeTensorMode()
    fake = [mode.from_tensor(x.detach()) for x in (q, k, v)]
    with mode:
        assert attention(*fake, mask=CAUSAL, score=function).shape == q.shape
    assert type(with_score_options(calls[0]).score.alibi_slopes) is torch.Tensor


def test_slopes_have_the_heads_and_sequences_of_the_call():
    """A function reads the last element of a tensor that is too small, and a part of one too large."""
    for function, shape in ((sloped, (H - 1,)), (sloped, (1,)), (by_sequence, (1, H)), (by_sequence, (B, 1))):
        assert options_of(score_mod(function, slopes(*shape))) == ("function",)
    given = tensors()
    for function, shape in ((sloped, (H + 2,)), (by_sequence, (B + 1, H + 3))):
        x = score_mod(function, slopes(*shape))
        assert options_of(x) == ("alibi_slopes",)
        alike(*(attention_with_lse(*given, mask=CAUSAL, score=y) for y in (x, whole(x))))


@NAMES
@BACKENDS
def test_gradients(backend, name):
    """Gradients agree, also of the slopes and of tensors that the rest of the function reads."""
    function, leaves = functions(grad=True)[name], tensors(grad=True)
    grads = []
    for x in (function, whole(function)):
        out, lse = attention_with_lse(*leaves, mask=CAUSAL, score=x, backend=backend)
        loss = out.sin().sum() + lse[lse.isfinite()].cos().sum()
        grads.append(torch.autograd.grad(loss, [*leaves, *function.tensors]))
    alike(*grads)


def test_gradients_against_differences():
    m, x = slopes(H, grad=True), slopes(H, 5, grad=True)
    given = [x[:, :5].detach().requires_grad_() for x in tensors()]
    function = score_mod(everything, m, x)

    def call(q, k, v, m, x):
        return attention_with_lse(q, k, v, mask=CAUSAL, score=function.reading([m, x]), backend="torch")

    assert torch.autograd.gradcheck(call, [*given, m, x])


@NAMES
@BACKENDS
def test_packed_calls(backend, name):
    function, cu = functions()[name], torch.tensor([0, 4, 13], dtype=torch.int32)
    q, k, v = (torch.randn(13, heads, D, dtype=torch.float64) for heads in (H, G, G))
    options = {"mask": CAUSAL, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "backend": backend}
    alike(*(varlen_attention_with_lse(q, k, v, score=x, **options) for x in (function, whole(function))))


@NAMES
@BACKENDS
@pytest.mark.parametrize("window", [None, 5])
def test_caches(window, backend, name):
    function, mask = functions()[name], CAUSAL if window is None else sliding(window)
    layout = KVLayout.grouped(G, D, window=window, dtype=torch.float64)
    cache = KVCache.paged([layout], pages=32, page_size=4, max_sequences=B)
    cache.admit(B)
    for tokens in (7, 1, 3):
        q, k, v = (torch.randn(B, tokens, heads, D, dtype=torch.float64) for heads in (H, G, G))
        with torch.no_grad(), cache.step(tokens) as (layer,):
            view, options = layer.append(k, v), {"mask": mask, "backend": backend}
            alike(
                *(cached_attention_with_lse(q, view, score=x, **options) for x in (function, whole(function)))
            )


@NAMES
def test_statistics(name):
    function, (q, k, _) = functions()[name], tensors()
    lse = attention_with_lse(q, k, k, mask=CAUSAL, score=whole(function))[1]
    for compute in (
        lambda x: attention_maxima(q, k, mask=CAUSAL, score=x),
        lambda x: attention_weights(q, k, lse, mask=CAUSAL, score=x, over="queries"),
        lambda x: attention_weights(q, k, lse, mask=CAUSAL, score=x, over="none", rows=torch.tensor([0, 8])),
    ):
        alike(compute(function), compute(whole(function)))


@NAMES
def test_chunks_of_larger_calls(name):
    """Chunks of heads and sequences read their own slopes; chunks of keys count from the first of all."""
    function, (q, k, v) = functions()[name], tensors()
    out, lse = attention_with_lse(q, k, v, mask=CAUSAL, score=function)
    for origin in (Origin(0, 0, 2, 1), Origin(0, 0, torch.tensor([2]).int(), torch.tensor([1]).int())):
        call = Call(q[1:, :, 2:], CAUSAL, Score(function=function), k[1:, :, 1:], v[1:, :, 1:], origin=origin)
        alike(attend(call._replace(lse=True)), (out[1:, :, 2:], lse[1:, 2:]))
    first = Call(q, CAUSAL, Score(function=function), k[:, 3:], v[:, 3:], origin=Origin(3, 3))
    moved = Call(q, CAUSAL, Score(function=whole(function)), k[:, 3:], v[:, 3:], origin=Origin(3, 3))
    alike(attend(first._replace(lse=True)), attend(moved._replace(lse=True)))


def test_trees_count_depths():
    ends, positions = torch.tensor([[4, 3, 3, 4]], dtype=torch.int32), torch.tensor([[0, 1, 2, 1]])
    mask, q = masks.until(ends, positions), torch.randn(1, 4, H, D, dtype=torch.float64)
    for function in (functions()["sloped"], functions()["behind"], functions()["everything"]):
        assert "alibi_slopes" not in options_of(None, call=Call(q, mask, Score(function=function), q, q))
        alike(*(attention_with_lse(q, q, q, mask=mask, score=x) for x in (function, whole(function))))


def test_layers():
    function = score_mod(lambda s, b, h, i, j, m: 5 * torch.tanh(s / 5) - m[h] * (i - j), torch.rand(H))
    layer = GroupedQueryAttention(32, H, num_kv_heads=G, mask=CAUSAL, score=function)
    x = torch.randn(2, 7, 32)
    assert explain(layer, x).spec.score == ("softcap", "alibi_slopes")
    other = GroupedQueryAttention(32, H, num_kv_heads=G, mask=CAUSAL, score=whole(function))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), other(x))


def test_compiled_calls_have_one_graph():
    m, x = torch.rand(H), torch.rand(H, 5)
    given = [y.float() for y in tensors()]
    made = score_mod(everything, m, x)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v, m, x):
        own = attention(q, k, v, mask=CAUSAL, score=score_mod(everything, m, x))
        return own, attention(q, k, v, mask=CAUSAL, score=made), attention(q, k, v, mask=FULL, score=made)

    torch.compiler.reset()
    expected = (attention(*given, mask=mask, score=whole(made)) for mask in (CAUSAL, CAUSAL, FULL))
    torch.testing.assert_close(compiled(*given, m, x), tuple(expected))


def test_functions_are_analysed_once(monkeypatch):
    function, given = functions()["everything"], tensors()
    monkeypatch.setattr(analysis, "polynomials", None)
    for mask in (CAUSAL, FULL):
        attention(*given, mask=mask, score=function)
        attention(*given, mask=mask, score=function.reading([slopes(H), slopes(H, 5)]))


def test_a_softcap_of_a_function_is_found_in_the_call_cache():
    cache = KVCache.contiguous([KVLayout.grouped(G, D)], max_sequences=1, max_length=8)
    cache.admit(1)
    q, k, v = (torch.randn(1, 5, heads, D) for heads in (H, G, G))
    function, found = score_mod(capped), []
    with cache.step(5) as (layer,):
        view = layer.append(k, v)
        for options in ({"score": function}, {"score": function}, {"softcap": 3.0}):
            found.append((cached_attention_with_lse(q, view, mask=CAUSAL, **options), CALL_CACHE.count(view)))
    assert len({count for _, count in found}) == 1
    alike(found[1][0], found[2][0])


@pytest.mark.parametrize("name", ["sloped", "by sequence", "everything"])
def test_errors_are_those_of_the_call(name):
    q, k, v = tensors()
    function = functions()[name]
    with pytest.raises(TypeError, match="q: expected a"):
        attention(None, k, v, mask=CAUSAL, score=function)
    with pytest.raises(ValueError, match="q: expected"):
        attention(q[0, 0, 0], k, v, mask=CAUSAL, score=function)
    with pytest.raises(TypeError, match="mask: expected"):
        attention(q, k, v, mask=None, score=function)
    with pytest.raises(TypeError, match="cu_seqlens"):
        varlen_attention_with_lse(
            q[0], k[0], v[0], cu_seqlens_q=None, cu_seqlens_k=None, mask=CAUSAL, score=function
        )
    far = function.reading([x.to("meta") for x in function.tensors])
    with pytest.raises(ValueError, match="tensor 0 of score_mod: expected device cpu"):
        attention(q, k, v, mask=CAUSAL, score=far)


def test_a_copy_with_another_program_takes_none_of_the_options():
    capped = score_mod(lambda s, b, h, i, j: 2 * torch.tanh(s / 2))
    halved = score_mod(lambda s, b, h, i, j: 0.5 * s)
    q, k, v = tensors()
    found = attention_with_lse(q, k, v, mask=CAUSAL, score=replace(capped, program=halved.program))
    assert_same_bits(*zip(found, attention_with_lse(q, k, v, mask=CAUSAL, score=halved), strict=True))
