"""Our operators as torch sees them: schemas, fakes, compilation, checkpointing, autocast."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attnlib import (
    CAUSAL,
    CHECKPOINT_SAVE_OPS,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    Rope,
    attention,
    attention_with_lse,
    sliding,
    varlen_attention,
)
from attnlib.backends.operators import flat_over_view
from attnlib.call.call import Call, Score, checked

OPS = torch.ops.attnlib


def permuted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random ``[b, s, h, d]`` that is dense in the order b, h, s, d, as transposed heads are."""
    b, s, h, d = shape
    return torch.randn(b, h, s, d, dtype=dtype).transpose(1, 2)


def forward_arguments(name: str) -> tuple:
    """Arguments of attnlib::torch_forward: such as torch's fused attention solves (16 keys or more), or all
    options.
    """
    queries = {"one token": 1, "everything": 7}.get(name, 19)
    q, k, v = (
        permuted(2, queries, 4, 8),
        permuted(2, 19, 2, 8),
        permuted(2, 19, 2, 5 if name == "everything" else 8),
    )
    if name == "packed":
        q, k, v = q[0], k[0], v[0]
        offsets = torch.tensor([0, 2, 18], dtype=torch.int32)
        numbers = (0, 0, 0, 0.3, None, 0.0, 17, 17, None, None, None, False, False)
        return (q, k, v, None, None, None, None, offsets, offsets, *(None,) * 9, *numbers)
    if name != "everything":
        right = 0 if name == "causal" else None
        return (q, k, v, *(None,) * 15, right, 0, 0, 0.3, None, 0.0, *(None,) * 5, False, False)
    bounds = (torch.tensor([0, 2], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32))
    return (q, k, v, torch.rand(2, 4), torch.randn(4), *bounds, None, None, torch.tensor([3]), *(None,) * 7,
            5, 0, 0, 0, 0.3, 2.0, 0.2, *(None,) * 5, False, False)  # fmt: skip


CASES = ["causal", "full", "one token", "everything", "packed"]


@pytest.mark.parametrize("case", CASES)
def test_the_forward_operator(case):
    torch.library.opcheck(OPS.torch_forward.default, forward_arguments(case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_backward_operator(case, with_lse):
    arguments = forward_arguments(case)
    out, lse = OPS.torch_forward(*arguments)
    dlse = torch.randn_like(lse) if with_lse else None
    torch.library.opcheck(OPS.torch_backward.default, (torch.randn_like(out), dlse, out, lse, *arguments))


def test_slopes_that_need_no_gradient_get_zeros():
    *arguments, learns = forward_arguments("everything")
    assert learns is False
    out, lse = OPS.torch_forward(*arguments, learns)
    dout = torch.randn_like(out)
    fixed, learnt = (OPS.torch_backward(dout, None, out, lse, *arguments, x) for x in (False, True))
    assert fixed[3].shape == learnt[3].shape
    assert learnt[3].any()
    assert not fixed[3].any()
    for n in (0, 1, 2, 4):
        assert torch.equal(fixed[n], learnt[n])


@pytest.mark.parametrize("layout", [KVLayout.grouped(2, 8, 5), KVLayout.latent(8, 4), KVLayout.grouped(2, 8)])
@pytest.mark.parametrize(("page_size", "tokens"), [(None, 17), (None, 6), (4, 17)])
def test_the_cache_operators(layout, page_size, tokens):
    cache = (
        KVCache.contiguous([layout], max_sequences=2, max_length=32)
        if page_size is None
        else KVCache.paged([layout], pages=16, page_size=page_size, max_sequences=2)
    )
    cache.admit(2)
    with cache.step(tokens, replay=True) as (kv,):
        view = kv.view()
        second = view.k_rope if layout.is_latent else view.v
        new = [torch.randn(12, *plane.shape[2:]) for plane in (view.k, second)]
        slots = torch.tensor([0, 1, -1, 3, 4, 5, 6, 7, 8, 9, 10, 11])
        torch.library.opcheck(OPS.torch_write.default, (view.k, second, *new, slots))
        for plane in (view.k, view.k_rope, view.v):
            if plane is not None:
                plane.normal_()
        q = torch.randn(2, tokens, 4, layout.dim + layout.rope_dim)
        asked = checked(Call(q, CAUSAL, Score(0.3, sinks=torch.randn(4)), kv=view))
        torch.library.opcheck(OPS.torch_cached.default, flat_over_view(asked))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fakes_and_meta_tensors_give_shapes_alone(dtype):
    with FakeTensorMode():
        q, k = permuted(2, 7, 4, 8, dtype=dtype), permuted(2, 9, 2, 8, dtype=dtype)
        out, lse = attention_with_lse(q.requires_grad_(), k, k[..., :5], mask=CAUSAL)
        assert out.shape == (2, 7, 4, 5)
        assert out.is_contiguous()
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        out.sum().backward()
        assert q.grad.shape == q.shape
    q, k = q_meta(2, 7, 4, 8), q_meta(2, 9, 2, 8)
    assert attention(q, k, k, mask=sliding(3)).device.type == "meta"


def q_meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"dropout_p": 0.2}], ids=str)
def test_compiles_to_one_graph_and_at_most_twice(options):
    counter = CompileCounterWithBackend("aot_eager")

    def loss(q, k, v, sinks):
        out, lse = attention_with_lse(q, k, v, mask=CAUSAL, sinks=sinks, **options)
        return (out * out).sum() + lse.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for tokens in (33, 65, 48, 97):
        leaves = [torch.randn(2, tokens, h, 8, requires_grad=True) for h in (4, 2, 2)]
        leaves.append(torch.randn(4, requires_grad=True))
        results = []
        for call in (loss, compiled):
            torch.manual_seed(0)
            value = call(*leaves)
            results.append([value, *torch.autograd.grad(value, leaves)])
        if not options.get("dropout_p"):  # a compiled random number is another one
            torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count <= 2


def test_packed_calls_compile_with_changing_offsets():
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, cu_seqlens):
        return varlen_attention(
            q, q * 1, q * 2, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, mask=CAUSAL
        )

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for cuts in ([0, 4, 9], [0, 0, 9], [0, 1, 7]):
        q, offsets = torch.randn(9, 4, 8, requires_grad=True), torch.tensor(cuts, dtype=torch.int32)
        out = compiled(q, offsets)
        torch.testing.assert_close(out, call(q, offsets))
        out.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing_names_our_operator(save):
    forward = OPS.torch_forward.default
    count = []

    def policy(context, op, *args, **kwargs):
        if op is forward:
            count.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if save and op is forward else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return attention(q.sin(), k.sin(), v.sin(), mask=CAUSAL, softcap=3.0).cos()

    calls = Calls(forward)
    leaves = [torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3)]
    plain = torch.autograd.grad(block(*leaves).sum(), leaves)
    with calls:
        out = checkpoint(
            block,
            *leaves,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        kept = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(kept, plain, rtol=0, atol=0)
    assert False in count  # the policy was asked about our operator
    assert calls.count == (1 if save else 2)


def layer_of(kind: str) -> torch.nn.Module:
    if kind == "gqa":
        return GroupedQueryAttention(
            32, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8), sinks=True, softcap=9.0
        )
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return MultiHeadLatentAttention(
        32, 4, mask=CAUSAL, q_lora_rank=None, rope=Rope(4, interleaved=True), **sizes
    )


KEEP = partial(create_selective_checkpoint_contexts, list(CHECKPOINT_SAVE_OPS))
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "whole": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": KEEP},
}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_a_checkpointed_layer_has_the_same_gradients(way, kind):
    layer, x = layer_of(kind), torch.randn(2, 9, 32, requires_grad=True)
    leaves = [x, *layer.parameters()]
    plain = backward(layer(x), leaves)
    with Calls(*CHECKPOINT_SAVE_OPS) as attentions, Calls(torch.ops.aten.mm.default) as products:
        out = checkpoint(layer, x, **CHECKPOINTS[way])
        once = products.count
        kept = backward(out, leaves)
    torch.testing.assert_close(kept, plain, rtol=0, atol=0)
    assert attentions.count == (1 if way == "selective" else 2)
    assert (
        products.count > 3 * once
    )  # forward, again, and two in backward, where the last one's output is not needed


def backward(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    for leaf in leaves:
        leaf.grad = None
    out.sin().sum().backward()
    return [leaf.grad for leaf in leaves]


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts how often operators really run."""

    def __init__(self, *ops):
        super().__init__()
        self.ops, self.count = ops, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.ops
        return func(*args, **(kwargs or {}))


def test_autocast_casts_all_three_and_leaves_fp64():
    q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8).bfloat16(), torch.randn(1, 5, 2, 8).half()
    with pytest.raises(TypeError, match=r"k: expected torch.float32 like q, got torch.bfloat16; .*autocast"):
        attention(q, k, v, mask=CAUSAL)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v, mask=CAUSAL).dtype == torch.bfloat16
        wide = q.double()
        assert attention(wide, wide, wide, mask=CAUSAL).dtype == torch.float64
    with torch.autocast("cpu", torch.float16):
        assert attention(k, k, k, mask=CAUSAL).dtype == torch.float16


@torch.no_grad()
def test_forward_mode_derivatives_are_refused():
    def call(x):
        return attention(x, x, x, mask=CAUSAL)

    x = torch.randn(1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        call(forward_ad.make_dual(x, x))
    with forward_ad.dual_level():  # where nothing has one
        assert torch.equal(call(x), attention(x, x, x, mask=CAUSAL))
