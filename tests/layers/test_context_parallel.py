"""Layers whose tokens ranks share have the outputs and gradients of one process that has all tokens."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from layer_helpers import OwnerAndReader
from leaving import leave
from torch import Tensor, nn
from torch.distributed import all_reduce, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from attnlib import (
    CAUSAL,
    FULL,
    Axes,
    Gate,
    GroupedQueryAttention,
    KVCache,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    QueryTemperature,
    Rope,
    ScoreFunction,
    mask_mod,
    masks,
    score_mod,
    scores,
    shared_angles,
    sliding,
)
from attnlib.convert import gqa_to_mla, mha_to_gqa
from attnlib.parallel import ContextParallel, shard
from attnlib.parallel.context_parallel import FORMS
from attnlib.scaling import DynamicNTKScaling

HIDDEN, HEADS, TOKENS = 32, 4, 48
PACK = (0, 11, 11, 30, 43)  # five tokens are of no sequence
AXES = Axes((2, 1, 1), "interleaved")
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 8}


def grouped(kind: type[nn.Module] = GroupedQueryAttention, **options) -> nn.Module:
    return kind(HIDDEN, HEADS, **{"mask": CAUSAL, "rope": Rope(8)} | options)


def latent(rope_dim: int = 4, **options) -> MultiHeadLatentAttention:
    rope = Rope(rope_dim, interleaved=True) if rope_dim else None
    options = (
        {"mask": CAUSAL, "q_lora_rank": None, "rope": rope, "qk_rope_head_dim": rope_dim} | LATENT | options
    )
    return MultiHeadLatentAttention(HIDDEN, HEADS, **options)


def functions() -> dict:
    """A score that learns and a mask, which ask for heads and for indices of the whole."""
    shown = torch.randint(0, 3, (HEADS, TOKENS)).int()
    masked = mask_mod(lambda b, h, i, j, shown: (shown[h, j] != 0) | (i == j), shown)
    return {"score": scores.distance_bias(nn.Parameter(torch.randn(HEADS, 9))), "mask": CAUSAL & masked}


def options() -> ScoreFunction:
    """A score function whose softcap and learned slopes become options of the call."""
    slopes = nn.Parameter(torch.rand(HEADS))
    return score_mod(lambda s, b, h, i, j, m: 2 * (3 * torch.tanh(s / 3) + m[h] * (j - i)), slopes)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mha": lambda: grouped(MultiHeadAttention, bias=True),
    "gqa": lambda: grouped(num_kv_heads=2, qk_norm=True, sinks=True, softcap=4.0),
    "gqa, norm after rope": lambda: grouped(num_kv_heads=2, qk_norm=True, norm_after_rope=True, mask=FULL),
    "gqa, window": lambda: grouped(num_kv_heads=2, mask=sliding(7), alibi=True),
    "gqa, functions": lambda: grouped(num_kv_heads=2, **functions()),
    "gqa, options of scores": lambda: grouped(num_kv_heads=2, score=options()),
    "gqa, temperature": lambda: grouped(num_kv_heads=2, temperature=QueryTemperature(0.5, 16)),
    "gqa, dynamic": lambda: grouped(num_kv_heads=2, rope=Rope(8, scaling=DynamicNTKScaling(2.0, 16))),
    "gqa, axes": lambda: grouped(num_kv_heads=2, rope=Rope(8, axes=AXES)),
    "gqa, dropout": lambda: grouped(num_kv_heads=2, dropout_p=0.3),
    "gqa, gate": lambda: grouped(num_kv_heads=2, gate=Gate("channel")),
    "gqa, values of keys": lambda: grouped(num_kv_heads=2, qk_norm=True, values="keys"),
    "gqa, shared keys": lambda: OwnerAndReader(grouped, num_kv_heads=2, qk_norm=True),
    "mla, shared keys": lambda: OwnerAndReader(latent),
    "mqa": lambda: grouped(MultiQueryAttention, mask=sliding(20), sinks=True),
    "mla": latent,
    "mla, q_lora": lambda: latent(q_lora_rank=8, form="expanded", bias=True),
    "mla, no rope": lambda: latent(0, mask=sliding(9)),
    "mla, functions": lambda: latent(**functions()),
    "mla, dropout": lambda: latent(dropout_p=0.3),
    "mla, frozen": lambda: latent().requires_grad_(False),
}


def make(name: str) -> nn.Module:
    """The same weights in every process, and none of them special."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for own, parameter in layer.named_parameters():
        if "norm" in own or own == "sinks":
            nn.init.normal_(parameter)
    return layer


def calls(name: str):
    """Ways to call a layer: dense with padding and a mask, dense alone, and packed."""
    torch.manual_seed(1)
    bounds = {"key_starts": torch.tensor([3, 0]), "key_ends": torch.tensor([44, 48])}
    documents = masks.documents(torch.randint(0, 4, (2, TOKENS)).sort().values)
    x = torch.randn(2, TOKENS, HIDDEN)
    yield x, {key: bound.int() for key, bound in bounds.items()}
    yield x, {"mask": documents}
    if name != "gqa, dynamic":  # of which nobody knows the length of a packed sequence
        yield x[0], {"cu_seqlens": torch.tensor(PACK, dtype=torch.int32)}


def train(layer: nn.Module, x: Tensor, dout: Tensor, options: dict) -> list[Tensor]:
    """The output, the gradient of x, and those of the weights that learn."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # of dropout, on every rank
    out = layer(x, **options)
    out.backward(dout)
    return [out.detach(), x.grad, *(w.grad for w in layer.parameters() if w.requires_grad)]


def compare(layer: nn.Module, name: str, mesh: DeviceMesh, form: str | None, *, zigzag: bool) -> None:
    """What the layer gives here is a part of what one process has, and its weights' gradients are one of
    terms.
    """
    whole = make(name)
    layer.context_parallel = ContextParallel(mesh, form, zigzag=zigzag)
    for x, options in calls(name):
        dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        own = [shard(y, mesh, dim=-2 % y.dim(), zigzag=zigzag) for y in (x, dout)]
        (out, dx, *dw), (right, right_dx, *right_dw) = (
            train(layer, *own, options),
            train(whole, x, dout, options),
        )
        expected = [shard(y, mesh, dim=-2 % y.dim(), zigzag=zigzag) for y in (right, right_dx)]
        dw = [y.full_tensor() if hasattr(y, "full_tensor") else y for y in dw]
        for y in dw:
            all_reduce(y, group=mesh.get_group())
        assert len(dw) == len(right_dw)
        for y, right in zip((out, dx, *dw), (*expected, *right_dw), strict=True):
            atol = 2e-6 * max(1.0, right.abs().max().item())
            assert torch.allclose(y, right, rtol=1e-5, atol=atol), (
                name,
                form,
                zigzag,
                (y - right).abs().max(),
            )


def work(rank: int, tokens: int, heads: int, folder: str) -> None:
    """One process of a mesh of so many ranks for tokens and for heads."""
    torch.set_num_threads(1)
    ranks = tokens * heads
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (tokens, heads), mesh_dim_names=("tokens", "heads"))
    for n, name in enumerate(LAYERS):
        layer = make(name)
        if heads > 1:
            parallelize_module(layer, mesh["heads"], layer.parallel_plan(mesh["heads"]))
        kv_heads = getattr(getattr(layer, "source", layer), "num_kv_heads", HEADS)
        for at, form in enumerate(FORMS):
            if form == "heads" and max(1, kv_heads // heads) % tokens:
                with pytest.raises(ValueError, match="expected heads that"):
                    compare(layer, name, mesh["tokens"], form, zigzag=True)
                continue
            for zigzag in (True, False) if ranks > 2 else ((n + at) % 2 == 0,):
                compare(layer, name, mesh["tokens"], form, zigzag=zigzag)
        compare(layer, name, mesh["tokens"], None, zigzag=True)
    leave()


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [
        (2, 1),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_tokens_have_outputs_and_gradients_of_the_whole(tokens, heads, tmp_path):
    mp.spawn(work, (tokens, heads, str(tmp_path)), nprocs=tokens * heads)


class Ranks:
    """In the place of a ContextParallel of two ranks, of which this is the second: it keeps what it is asked
    for.
    """

    mesh = SimpleNamespace(size=lambda: 2)

    def __init__(self):
        self.asked: list[tuple] = []

    def positions(self, tokens, device=None):
        return torch.arange(tokens, 2 * tokens, device=device)

    def attend(self, call, name=None, source=None):
        self.asked.append((call, name, source))
        width = call.v.shape[-1] if source is None else source.expand(*source.tensors)[1].shape[-1]
        return call.q.new_zeros(*call.q.shape[:-1], width)


X = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(4))


def test_latents_are_sent_and_not_what_they_expand_to():
    ranks = Ranks()
    for rope_dim, widths in ((4, [12, 4]), (0, [12])):
        layer = latent(rope_dim, context_parallel=ranks, backend="torch")
        layer(X)
        call, name, source = ranks.asked[-1]
        assert call.k is call.v is None
        assert name == "torch"
        assert [x.shape[-1] for x in source.tensors] == widths
        assert [x is layer.kv_b_proj.weight for x in source.weights] == [True]
        k, v = source.expand(*source.tensors)
        assert k.shape == (2, 8, HEADS, 8 + rope_dim)
        assert v.shape == (2, 8, HEADS, 8)
    layer.kv_b_proj.requires_grad_(False)
    layer(X)
    assert ranks.asked[-1][2].weights == ()


@pytest.mark.parametrize("axes", [None, AXES])
@pytest.mark.parametrize("cu", [None, (0, 5, 16)])
def test_tokens_are_where_they_are_in_the_whole(cu, axes):
    """Given positions are those of this rank's tokens; by default ranks tell them, and packs begin again."""
    layer, ranks = grouped(context_parallel=Ranks(), rope=Rope(8, axes=axes)), []
    x = X if cu is None else X[0]
    options = {} if cu is None else {"cu_seqlens": torch.tensor(cu, dtype=torch.int32)}
    at = torch.arange(8, 16) - (0 if cu is None else 5)
    at = at if axes is None else at.expand(3, 8)
    for given in ({}, {"positions": at}, {"angles": shared_angles([layer], x, **options)[0]}):
        layer(x, **given, **options)
        ranks.append(layer.context_parallel.asked[-1][0].q)
    assert all(torch.equal(q, ranks[0]) for q in ranks)
    layer.context_parallel = None
    own, elsewhere = (shared_angles([layer], x, positions=p, **options)[0].cos for p in (at, None))
    assert not torch.equal(own, elsewhere)


def test_what_ranks_cannot_share_is_refused():
    layer = grouped(rope=None, mask=FULL)
    cache = KVCache.paged([layer.kv_layout], pages=2, page_size=8, max_sequences=2)
    cache.admit(2)
    layer.context_parallel = Ranks()
    with pytest.raises(
        ValueError, match=r"context: expected None with .*layer.context_parallel = None to attend to a"
    ):
        layer(X, context=X)
    refusal = r"kv: expected .*layer.context_parallel = None to decode"
    with torch.no_grad(), pytest.raises(ValueError, match=refusal), cache.step(8) as (kv,):
        layer(X, kv=kv)
    layer.context_parallel = 2
    with pytest.raises(
        TypeError, match=r"context_parallel: expected an attnlib.parallel.ContextParallel or None, got"
    ):
        layer(X)


@pytest.mark.parametrize("make", [grouped, latent])
def test_what_is_no_context_parallel_is_refused(make):
    with pytest.raises(
        TypeError, match=r"context_parallel: expected an attnlib.parallel.ContextParallel .* got str"
    ):
        make(context_parallel="ring")


def test_absorbed_layers_share_no_tokens():
    refusal = r"context_parallel: expected form='auto' .* got form='absorbed'"
    with pytest.raises(ValueError, match=refusal):
        latent(form="absorbed", context_parallel=Ranks())
    layer = latent(form="absorbed")
    layer.context_parallel = Ranks()
    with pytest.raises(ValueError, match=refusal):
        layer(X)


def test_a_layer_prints_the_ranks_that_share_its_tokens():
    ranks = ContextParallel(SimpleNamespace(ndim=1), "ring")
    assert re.search(
        r"context_parallel=ContextParallel\(.*form='ring'", repr(grouped(context_parallel=ranks))
    )
    assert "context_parallel" not in repr(grouped())


def test_converted_layers_share_tokens_with_the_same_ranks():
    layer = grouped(MultiHeadAttention, context_parallel=Ranks())
    for made in (mha_to_gqa(layer, 2), gqa_to_mla(mha_to_gqa(layer, 1))):
        assert made.context_parallel is layer.context_parallel
