"""Choosing a backend: pure, explained, and never a silent fallback."""

import warnings
from dataclasses import replace

import pytest
import torch
from probing import forgotten

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    SlowPathWarning,
    attention,
    attention_with_lse,
    cached_attention,
    explain,
    rotate,
    sliding,
    varlen_attention,
)
from attnlib.backends._triton.launching import launch
from attnlib.call.cache import CallCache
from attnlib.call.call import Call, checked
from attnlib.dispatch import run as running
from attnlib.dispatch.select import PREFERENCE, backend_of, explanation, select
from attnlib.masks.ready_made import mask_tensor


def spec_of(*, strided: bool = False, **options):
    q = torch.randn(1, 5, 2, 8)
    v = torch.randn(1, 5, 8, 2).transpose(2, 3) if strided else q
    return explain(attention, q, q, v, mask=CAUSAL, **options).spec


def test_an_unknown_backend_is_refused_with_the_known_ones():
    known = "'strict', 'triton', 'torch', 'reference', 'triton:generic'"
    with pytest.raises(ValueError, match=f"backend: expected None, {known}, got 'flash'"):
        select(spec_of(), "flash")


@pytest.mark.parametrize("name", list(PREFERENCE))
def test_a_named_backend_runs_or_raises(name):
    spec = spec_of()._replace(device="cuda", arch=90)
    assert select(spec, name) is backend_of(name)
    cached = spec._replace(kind="cached", grad=True)
    with pytest.raises(
        NotImplementedError, match=rf"{name}: .*cached attention has no backward; wrap .*no_grad"
    ):
        select(cached, name)


def test_the_answer_depends_on_the_spec_alone():
    """So that a laptop can ask about any GPU."""
    spec = spec_of()._replace(device="cuda", arch=90)
    for backend in map(backend_of, PREFERENCE):
        assert backend.unsupported(spec) == backend.unsupported(spec_of()._replace(device="cuda", arch=90))
        assert backend.slow(spec) == backend.slow(spec_of()._replace(device="cuda", arch=90))
    assert select(spec) is select(spec, "strict") is backend_of("triton")
    wide = spec._replace(grad=True, value_dim=640)
    fused = "runs on torch's memory-efficient attention"
    for tiled in ({"head_dim": 59}, {"score": ("softcap",)}, {"dropout": True}, {"mask": sliding(9)}):
        for changes, way in (
            (tiled, "runs tile by tile"),
            ({"mask": FULL}, fused),
            ({"kind": "varlen"}, fused),
        ):
            with pytest.warns(SlowPathWarning, match=f"torch: {way}"):
                assert select(wide._replace(**changes)) is backend_of("torch")
            with pytest.raises(NotImplementedError, match=f"strict: torch would be slow: {way}"):
                select(wide._replace(**changes), "strict")
    packed = wide._replace(kind="varlen")
    assert any("waits for the device" in reason for reason in backend_of("torch").slow(packed))


FP8 = KVLayout.grouped(2, 64, storage_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "needs a CUDA device, got cpu"),
        ({"arch": 75}, "needs sm_80 or newer, got sm_75"),
        ({"dtype": torch.float64}, "computes in fp32, got fp64"),
        ({"grad": True, "head_dim": 640}, "has kernels for heads of up to 576, got 640"),
        ({"grad": True, "head_dim": 320}, "has a backward in fp32 for heads of up to 256, got 320; use bf16"),
        ({"grad": True, "value_dim": 520}, "has kernels for values of up to 512 channels, got 520"),
        ({"kind": "cached", "grad": True}, "cached attention has no backward"),
        ({"kind": "cached", "arch": 80, "layout": FP8}, "reads fp8 caches from sm_89 on, got sm_80"),
        ({"value_dim": 640}, "has kernels for heads of up to 576, got 640"),
    ],
)
def test_what_triton_refuses(changes, reason):
    [told] = backend_of("triton").unsupported(
        spec_of()._replace(**({"device": "cuda", "arch": 90} | changes))
    )
    assert told.startswith(reason)


def test_a_cpu_call_is_not_slow_and_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(spec_of()) is select(spec_of(), "strict") is backend_of("torch")


def test_strict_refuses_to_copy():
    q = torch.randn(1, 5, 2, 8)
    v = torch.randn(1, 5, 8, 2).transpose(2, 3)
    torch.testing.assert_close(attention(q, q, v, mask=CAUSAL), attention(q, q, v.contiguous(), mask=CAUSAL))
    with pytest.raises(NotImplementedError, match="v: the last dimension is not contiguous"):
        attention(q, q, v, mask=CAUSAL, backend="strict")


def test_nothing_left_to_choose_raises_with_every_reason():
    with pytest.raises(NotImplementedError, match="no backend can run this call") as error:
        select(spec_of()._replace(kind="cached", grad=True))
    assert str(error.value).count("cached attention has no backward") == len(PREFERENCE)


def test_explain_names_the_choice_and_runs_nothing(monkeypatch):
    q = torch.randn(1, 5, 2, 8)
    calls = []
    monkeypatch.setattr(torch.ops.attnlib, "torch_forward", lambda *args: calls.append(args))
    told = explain(attention_with_lse, q, q, q[..., :4], mask=sliding(3), softcap=2.0)
    assert (told.chosen, told.slow, calls) == ("torch", [], [])
    assert told.rejected == {"triton": ["needs a CUDA device, got cpu"]}
    for words in (
        "dense attention",
        "runs on: torch",
        "  value_dim  4\n",
        "  mask       sliding(3)\n",
        "  score      ('softcap',)\n",
        "  lse        True\n",
    ):
        assert words in str(told)
    slow = explain(attention, q, q, torch.randn(1, 5, 8, 2).transpose(2, 3), mask=CAUSAL)
    assert "slow: v: the last dimension is not contiguous, so it is copied once" in str(slow)


def test_explain_knows_every_door():
    q, offsets = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    packed = explain(varlen_attention, q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=CAUSAL)
    assert packed.spec.kind == "varlen"
    cache = KVCache.paged([KVLayout.latent(6, 2)], pages=4, page_size=4, max_sequences=1)
    cache.admit()
    with cache.step(3, replay=True) as (kv,):
        told = explain(cached_attention, torch.randn(1, 3, 4, 8), kv.view(), mask=CAUSAL)
        asked = explain(cached_attention, torch.randn(1, 3, 4, 8, requires_grad=True), kv.view(), mask=CAUSAL)
    assert (told.spec.kind, told.spec.kv_heads, told.spec.value_dim, told.spec.page_size) == (
        "cached",
        1,
        6,
        4,
    )
    assert asked.chosen is None
    assert set(asked.rejected) == {"triton", "torch", "reference"}
    with pytest.raises(ValueError, match="call: expected a layer or one of attention"):
        explain(rotate, q)


def test_an_explanation_of_a_named_backend_is_about_it_alone():
    assert explanation(spec_of(), "reference").chosen == "reference"
    assert explanation(spec_of(strided=True), "strict").chosen is None


def test_the_interpreter_is_no_place_for_bf16(monkeypatch):
    """Its products of bf16 are wrong: 8e8 in place of 1 was seen."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.randn(1, 5, 2, 16)
    assert explain(attention, q, q, q, mask=CAUSAL).chosen == "triton"
    told = explain(attention, *[q.bfloat16()] * 3, mask=CAUSAL)
    assert told.chosen == "torch"
    assert told.rejected == {"triton": ["Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32"]}
    with pytest.raises(NotImplementedError, match="triton: Triton's interpreter multiplies bf16 wrongly"):
        attention(*[q.bfloat16()] * 3, mask=CAUSAL, backend="triton")
    cache = KVCache.paged(
        [KVLayout.grouped(2, 16, dtype=torch.bfloat16)], pages=4, page_size=4, max_sequences=1
    )
    cache.admit()
    new = torch.randn(1, 3, 2, 16).bfloat16()
    with cache.step(3) as (kv,):
        view = kv.append(new, new)
    assert torch.equal(
        view.k.flatten(0, 1)[:3], new[0]
    )  # the interpreter would have truncated nothing but rounded
    assert explain(cached_attention, new, view, mask=CAUSAL).chosen == "torch"


def test_a_warning_names_the_line_that_called(monkeypatch):
    """The one outside this package, be it of a function or of a layer; as on a GPU that Triton does not
    serve.
    """

    def on_an_old_gpu(call: Call) -> Call:
        call = checked(call)
        return call._replace(spec=call.spec._replace(device="cuda", arch=75))

    monkeypatch.setattr(running, "checked", on_an_old_gpu)
    layer, x, q = GroupedQueryAttention(16, 2, mask=CAUSAL), torch.randn(1, 5, 16), torch.randn(1, 5, 2, 8)
    with pytest.warns(SlowPathWarning, match="memory-efficient") as called:
        attention(q, q, q, mask=CAUSAL)
    with pytest.warns(SlowPathWarning, match="memory-efficient") as layered:
        layer(x)
    assert called[0].filename == layered[0].filename == __file__
    assert called[0].lineno == layered[0].lineno - 2


@pytest.mark.parametrize("name", [None, "strict", "triton"])
def test_a_hopper_gpu_without_its_kernels_warns_once(name, monkeypatch):
    """The first call warns, with every way to choose the backend; none raises."""
    spec = spec_of()._replace(device="cuda", arch=90)
    monkeypatch.setattr(launch, "missing_names", lambda: ["gluon.tma"])
    with forgotten():
        with pytest.warns(
            SlowPathWarning, match=r"Hopper kernels: this Triton lacks gluon\.tma.*update attnlib"
        ):
            assert select(spec, name) is backend_of("triton")
        select(spec, name)  # warnings are errors
        assert not launch.has_gluon()
        told = str(explanation(spec, name))
    assert (
        "fast path off: dedicated Hopper kernels: this Triton lacks gluon.tma; the generic kernels run"
        in told
    )


@pytest.mark.parametrize("arch", [80, 89, 100])
def test_other_gpus_have_no_dedicated_kernels_to_miss(arch, monkeypatch):
    spec = spec_of()._replace(device="cuda", arch=arch)
    monkeypatch.setattr(launch, "missing_names", lambda: ["gluon.tma"])
    with forgotten():
        select(spec)
        assert "fast paths: on" in str(explanation(spec, None))


def test_what_is_prepared_is_bounded_and_lives_as_long_as_its_view():
    cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=4, page_size=4, max_sequences=1)
    cache.admit()
    with cache.step(1) as (kv,):
        view = replace(kv.append(*torch.randn(2, 1, 1, 2, 8)))
    store = CallCache(2)
    for n in range(3):
        store.add(None, (n,), lambda q, k, v: None)
        store.add(view, (n,), lambda q, k, v: None)
    store.add(view, (3,), None)
    assert store.count() == store.count(view) == 1
    assert store.find(None, (2,)) is not store.find(view, (2,)) is not None
    assert store.find(view, (3,)) is store.find(replace(view), (2,)) is None
    del view
    assert not len(store._over_views)
    store.clear()
    assert store.count() == 0


def test_a_compiled_caller_may_change_its_dicts():
    """Dynamo follows no mapping of a module once a dict has changed, as in models of transformers."""

    def step(q, shown, known):
        known["seen"] = q
        return attention(q, q, q, mask=mask_tensor(shown)), attention(q, q, q, mask=CAUSAL)

    q, shown = torch.randn(1, 5, 2, 8), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for ours, theirs in zip(compiled(q, shown, {}), step(q, shown, {}), strict=True):
        torch.testing.assert_close(ours, theirs)
