"""Layers under tensor parallelism have the outputs and gradients of the whole layer, on every rank."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from layer_helpers import OwnerAndReader, assert_twice_as_good
from leaving import leave
from safetensors import safe_open
from safetensors.torch import save_file
from selected_cases import lists
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from attnlib import (
    CAUSAL,
    FULL,
    Gate,
    GroupedQueryAttention,
    Indexer,
    KVCache,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rope,
    ScoreFunction,
    SlowPathWarning,
    mask_mod,
    masks,
    score_mod,
    scores,
    sliding,
)
from attnlib.layers.tensor_parallel import ALL_HEADS, MARK, share_of

RANKS = 2
HIDDEN, HEADS = 32, 4
BATCH, TOKENS = 2, 9
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}


def grouped(num_kv_heads: int, *, num_heads: int = HEADS, **options) -> GroupedQueryAttention:
    options = {"mask": CAUSAL, "head_dim": 16} | options
    return GroupedQueryAttention(HIDDEN, num_heads, num_kv_heads=num_kv_heads, **options)


def latent(**options) -> MultiHeadLatentAttention:
    options = {"mask": CAUSAL, "q_lora_rank": None, "rope": Rope(16, interleaved=True)} | LATENT | options
    return MultiHeadLatentAttention(HIDDEN, HEADS, **options)


def functions() -> dict:
    """A score and a mask that ask which head it is; one reads weights, the other a table."""
    shown = torch.randint(0, 3, (HEADS, 2 * TOKENS)).int()
    masked = mask_mod(lambda b, h, i, j, shown: (shown[h, j] != 0) | (i == j), shown)
    return {"score": scores.distance_bias(nn.Parameter(torch.randn(HEADS, 5))), "mask": CAUSAL & masked}


def options() -> ScoreFunction:
    """A score function whose softcap and learned slopes become options of the call."""
    slopes = nn.Parameter(torch.rand(HEADS))
    return score_mod(lambda s, b, h, i, j, m: 2 * (3 * torch.tanh(s / 3) + m[h] * (j - i)), slopes)


class Selecting(GroupedQueryAttention):
    """A layer that selects blocks for each of its ``lists`` KV heads or query heads, of all ranks."""

    lists = 2

    def forward(self, x: Tensor, **options) -> Tensor:
        mask = masks.selected(lists(BATCH, x.shape[1], self.lists, 3, 5), 2)
        return super().forward(x, mask=mask, **options)


def selecting(c: int) -> Selecting:
    layer = Selecting(HIDDEN, HEADS, num_kv_heads=2, head_dim=16, mask=CAUSAL, sinks=True)
    layer.lists = c
    return layer


BRANCH = Indexer(heads=2, head_dim=8, top=3, rope=Rope(4))


LAYERS = {
    "mha": lambda: grouped(4, rope=Rope(16), bias=True, output_bias=False),
    "gqa": lambda: grouped(2, rope=Rope(16), qk_norm=True),
    "gqa, sinks": lambda: grouped(2, mask=sliding(4), sinks=True, qk_norm=True),
    "gqa, sharded sinks": lambda: grouped(2, sinks=True),
    "gqa, alibi": lambda: grouped(2, sinks=True, alibi=True, softcap=3.0),
    "gqa, sharded norms": lambda: grouped(2, rope=Rope(16), qk_norm=True),
    "gqa, gathered": lambda: grouped(2, rope=Rope(16), qk_norm=True, sinks=True),
    "gqa, fsdp": lambda: grouped(2, rope=Rope(16), qk_norm=True, sinks=True),
    "gqa, gate": lambda: grouped(2, rope=Rope(16), gate=Gate("head", bias=True)),
    "gqa, context": lambda: grouped(2, mask=FULL, sinks=True),
    "gqa, whole kv": lambda: grouped(2, rope=Rope(16), qk_norm=True),
    "gqa, context, whole kv": lambda: grouped(2, mask=FULL, sinks=True),
    "mqa, whole kv": lambda: grouped(1, rope=Rope(16), qk_norm=True, sinks=True),
    "gqa, values of keys": lambda: grouped(2, rope=Rope(16), qk_norm=True, values="keys"),
    "mqa, values of keys": lambda: grouped(1, rope=Rope(16), values="keys", bias=True),
    "mla": latent,
    "mla, q_lora": lambda: latent(q_lora_rank=8, bias=True),
    "mla, gate": lambda: latent(gate=Gate("channel", "softplus")),
    "mla, fsdp": lambda: latent(q_lora_rank=8),
    "mla, no rope": lambda: latent(qk_rope_head_dim=0, rope=None),
    "mla, context": lambda: latent(mask=FULL, qk_rope_head_dim=0, rope=None),
    "gqa, functions": lambda: grouped(2, rope=Rope(16), sinks=True, **functions()),
    "mqa, functions": lambda: grouped(1, **functions()),
    "gqa, functions, sharded scores": lambda: grouped(2, **functions()),
    "gqa, functions, fsdp": lambda: grouped(2, **functions()),
    "gqa, options of scores": lambda: grouped(2, score=options()),
    "mla, functions": lambda: latent(**functions()),
    "mla, functions, expanded": lambda: latent(form="expanded", **functions()),
    "gqa, shared keys": lambda: OwnerAndReader(grouped, num_kv_heads=2, rope=Rope(16), qk_norm=True),
    "mqa, shared keys": lambda: OwnerAndReader(grouped, num_kv_heads=1, rope=Rope(16), sinks=True),
    "mla, shared keys": lambda: OwnerAndReader(latent),
    "gqa, dropout": lambda: grouped(2, rope=Rope(16), dropout_p=0.4),
    "mla, dropout": lambda: latent(dropout_p=0.4),
    "gqa, KV heads selected": lambda: selecting(2),
    "gqa, query heads selected": lambda: selecting(4),
    "gqa, index branch": lambda: grouped(2, rope=Rope(16), sinks=True, select=BRANCH),
    "mla, index branch": lambda: latent(q_lora_rank=8, select=replace(BRANCH, source="latent")),
}
FOUR = (
    "mha",
    "gqa",
    "mqa, whole kv",
    "mla",
    "gqa, functions",
    "mqa, functions",
    "gqa, dropout",
    "gqa, KV heads selected",
)
COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "g_proj")
BY_HAND = ("gqa, whole kv", "gqa, context, whole kv")  # their plans would shard K and V too
COMPILED = ("gqa, sinks", "mqa, whole kv", "mla", "gqa, functions")
UNEVEN = {  # the layer, the projections to shard, and what it says
    "k_proj alone": (lambda: grouped(2), ("k_proj", "v_proj"), r"ValueError: k_proj: .*q_proj"),
    "kv_b_proj alone": (latent, ("kv_b_proj",), r"ValueError: kv_b_proj: expected h=4 .*got 2; shard both"),
    "no g_proj": (
        lambda: grouped(2, gate=Gate("head")),
        ("q_proj", "k_proj", "v_proj"),
        "ValueError: g_proj: expected 2 features for 2 heads, got 4; shard it",
    ),
    "groups across ranks": (
        lambda: grouped(3, num_heads=6),
        ("q_proj",),
        "ValueError: q_proj: expected groups of 2 query heads .*got 3",
    ),
    "norms by themselves": (
        lambda: grouped(2, qk_norm=True),
        ("q_proj", "k_proj", "v_proj"),
        "NotImplementedError: qk_norm: .*fully_shard on the layer",
    ),
}


def make(name: str) -> nn.Module:
    """The same weights in every process, and none of them special."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for parameter_name, parameter in layer.named_parameters():
        if "norm" in parameter_name or parameter_name == "sinks":
            nn.init.normal_(parameter)
    return layer


def inputs(name: str) -> dict[str, Tensor]:
    x, context = torch.randn(2, BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return {"x": x, "context": context[:, :7]} if "context" in name else {"x": x}


def parallel(name: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The layer with its heads shared out."""
    layer, heads = make(name).to(device), mesh["heads"]
    plan = layer.parallel_plan(heads)
    if name in BY_HAND:
        plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    if name.endswith("gathered"):
        columns = [column for column in COLUMNS if hasattr(layer, column)]
        plan = {column: ColwiseParallel(output_layouts=Replicate()) for column in columns}
    if name.endswith("sharded norms"):
        plan |= dict.fromkeys(("q_norm", "k_norm"), SequenceParallel(sequence_dim=2, use_local_output=True))
    parallelize_module(layer, heads, plan)
    if name.endswith("sharded sinks"):
        layer.sinks = nn.Parameter(distribute_tensor(layer.sinks.detach(), heads, [Shard(0)]))
    if name.endswith("sharded scores"):
        layer.score.bias = nn.Parameter(distribute_tensor(layer.score.bias.detach(), heads, [Shard(0)]))
    return fully_shard(layer, mesh=mesh["data"]) if name.endswith("fsdp") else layer


def train(layer: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and parameters, whole."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    torch.manual_seed(3)  # of dropout, on every rank
    out = layer(**inputs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    losses = {}
    if getattr(layer, "indexer", None) is not None:  # the gradients of its weights are those of their loss
        losses = {"loss": layer.index_loss(inputs["x"], selected=layer.choose(inputs["x"]))}
        losses["loss"].backward()
    results = {"out": out} | losses | {name: x.grad for name, x in inputs.items()}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: whole(x) for name, x in results.items()}


def whole(x: Tensor) -> Tensor:
    """``x`` of all ranks, and complete: what a collective returns is filled later."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x.detach()).clone().cpu()


def decode(layer: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
    """The outputs over a paged cache: of a prompt and a few short steps, or with the context that it
    holds.
    """
    cache = KVCache.paged([layer.kv_layout], pages=8, page_size=4, max_sequences=BATCH, device=x.device)
    cache.admit(BATCH)
    with torch.no_grad():
        if context is not None:
            with cache.step(context.shape[1]) as (kv,):
                layer.append_context(context, kv)
            with cache.read(x.shape[1]) as (kv,):
                return whole(layer(x, context=kv.view()))
        outs = []
        for part in x.split((5, 1, 1, 2), 1):
            with cache.step(part.shape[1]) as (kv,):
                outs.append(whole(layer(part, kv=kv)))
    return torch.cat(outs, 1)


def refusal(name: str, mesh: DeviceMesh, device: torch.device) -> str:
    """What a layer says whose heads cannot be shared out so."""
    make, columns, _ = UNEVEN[name]
    layer = parallelize_module(make().to(device), mesh["heads"], dict.fromkeys(columns, ColwiseParallel()))
    if name.startswith("norms"):
        fully_shard(layer.q_norm, mesh=mesh["data"])
    try:
        layer(**inputs(name))
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def work(rank: int, ranks: int, device: str, folder: str) -> None:
    """One process: what each layer gives here."""
    warnings.simplefilter("error", SlowPathWarning)
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    init_process_group(BACKENDS[device], init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh(device, (1, ranks), mesh_dim_names=("data", "heads"))
    are_few = ranks == RANKS
    results = {name: refusal(name, mesh, here) for name in UNEVEN} if device == "cpu" and are_few else {}
    for name in LAYERS if are_few else FOUR:
        given = {key: x.to(here) for key, x in inputs(name).items()}
        layer = parallel(name, mesh, here)
        results[name] = train(layer, given)
        if is_decoded(name):
            results[name]["decoded"] = decode(layer, **given)
        if name in COMPILED and are_few:
            layer.zero_grad()
            layer.compile(fullgraph=True, backend="aot_eager")
            results[f"{name}, compiled"] = train(layer, given)
    write(results, Path(folder, f"{rank}"))
    leave()


def is_decoded(name: str) -> bool:
    """Whether decoding gives what training does: dropout is of training, lists are those of all tokens, and a
    kv_layout of heads as they are split.
    """
    return not name.endswith(("gathered", "dropout", "selected"))


def write(results: dict[str, dict[str, Tensor] | str], path: Path) -> None:
    """The tensors of every run, and what was said in place of some, in a file."""
    given = {name: of for name, of in results.items() if isinstance(of, dict)}
    tensors = {f"{name}/{key}": x.contiguous() for name, of in given.items() for key, x in of.items()}
    save_file(tensors, path, metadata={name: text for name, text in results.items() if isinstance(text, str)})


def read(path: Path) -> dict[str, dict[str, Tensor] | str]:
    """What was written."""
    with safe_open(path, "pt") as file:
        results = dict(file.metadata() or {})
        for key in file.keys():  # noqa: SIM118 - no mapping
            name, _, of = key.rpartition("/")
            results.setdefault(name, {})[of] = file.get_tensor(key)
    return results


def spawn(device: str, folder: Path, ranks: int = RANKS) -> list[dict]:
    """The results of all processes."""
    mp.spawn(work, (ranks, device, str(folder)), nprocs=ranks)
    return [read(folder / f"{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return spawn("cpu", tmp_path_factory.mktemp("ranks"))


def check(results: list[dict], name: str, device: str, run: str = "") -> None:
    truth = train(make(name).double(), {key: x.double() for key, x in inputs(name).items()})
    layer, given = make(name).to(device), {key: x.to(device) for key, x in inputs(name).items()}
    single = train(layer, given) | {"decoded": decode(layer, **given)}
    truth["decoded"] = truth["out"]
    for ours in (result[name + run] for result in results):
        assert ("decoded" in ours) == (is_decoded(name) and not run)
        assert ours.keys() | {"decoded"} == truth.keys()
        assert_twice_as_good(ours, *({key: side[key] for key in ours} for side in (single, truth)))


@pytest.mark.parametrize("name", LAYERS)
def test_every_rank_has_outputs_and_gradients_of_the_whole(processes, name):
    check(processes, name, "cpu")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_have_them_too(processes, name):
    check(processes, name, "cpu", ", compiled")


@pytest.mark.parametrize("name", UNEVEN)
def test_heads_that_cannot_be_shared_out_so_are_refused(processes, name):
    for results in processes:
        assert re.search(UNEVEN[name][2], results[name]), results[name]


@pytest.mark.slow
def test_four_ranks_have_them_too(tmp_path):
    """There a KV head of two serves two ranks each, and one of one serves all."""
    results = spawn("cpu", tmp_path, 4)
    for name in FOUR:
        check(results, name, "cpu")


@pytest.mark.parametrize(
    ("layer", "ranks", "columns"),
    [
        (lambda: grouped(4), 2, "q_proj k_proj v_proj"),
        (lambda: grouped(2), 2, "q_proj k_proj v_proj"),
        (lambda: grouped(2), 4, "q_proj"),
        (lambda: grouped(2, gate=Gate("head")), 2, "q_proj k_proj v_proj g_proj"),
        (lambda: MultiQueryAttention(HIDDEN, HEADS, mask=CAUSAL), 2, "q_proj"),
        (lambda: MultiQueryAttention(HIDDEN, HEADS, mask=CAUSAL), 1, "q_proj k_proj v_proj"),
        (latent, 2, "q_proj kv_b_proj"),
        (lambda: latent(q_lora_rank=8), 4, "q_b_proj kv_b_proj"),
    ],
)
def test_a_plan_shares_out_heads(layer, ranks, columns):
    plan = layer().parallel_plan(SimpleNamespace(ndim=1, size=lambda: ranks))
    assert {name for name, style in plan.items() if isinstance(style, ColwiseParallel)} == {*columns.split()}
    assert [name for name, style in plan.items() if isinstance(style, RowwiseParallel)] == ["o_proj"]
    assert len(plan) == len(columns.split()) + 1


@pytest.mark.parametrize(
    ("layer", "ranks", "dims", "message"),
    [
        (latent, 3, 1, r"mesh: expected a number of ranks that divides num_heads=4, .* got 3"),
        (
            lambda: grouped(3, num_heads=6),
            2,
            1,
            r"mesh: expected .* num_kv_heads=3 or is a multiple of it, got 2",
        ),
        (lambda: grouped(4), 2, 2, r"mesh: expected one dimension, as of mesh\['tp'\], got 2"),
    ],
)
def test_heads_that_no_plan_can_share_out(layer, ranks, dims, message):
    with pytest.raises(ValueError, match=message):
        layer().parallel_plan(SimpleNamespace(ndim=dims, size=lambda: ranks))


class Grid:
    """A mesh of 3 by 2 processes, seen from the last."""

    def size(self, dim: int) -> int:
        return (3, 2)[dim]

    def get_local_rank(self, dim: int) -> int:
        return self.size(dim) - 1


@pytest.mark.parametrize(
    ("placements", "share"),
    [
        (
            (_StridedShard(0, split_factor=2), Shard(0)),
            (2, 2, (False, True)),
        ),  # FSDP around it, outside of a forward
        ((Replicate(), Shard(0)), (2, 2, (False, True))),
        ((Shard(0), Shard(0)), (10, 2, (True, True))),
        ((Shard(1), Replicate()), None),
    ],
)
def test_the_share_of_a_rank_is_read_from_its_weight(placements, share):
    heads = 12 if share and all(share[2]) else HEADS
    weight = SimpleNamespace(device_mesh=Grid(), placements=placements)
    found = share_of(SimpleNamespace(weight=weight, **{MARK: True}), heads)
    if share is None:
        assert found is ALL_HEADS
    else:
        assert (found.first, found.count, found.shares) == share
    assert share_of(SimpleNamespace(weight=weight), heads) is ALL_HEADS  # FSDP's own
    assert share_of(SimpleNamespace(weight=weight), heads, heads) is ALL_HEADS
    assert share_of(SimpleNamespace(weight=weight), heads, heads // 2) == found


@pytest.mark.gpu2
@pytest.mark.parametrize(("ranks", "names"), [(RANKS, LAYERS), (4, FOUR)], ids=["2", "4"])
def test_gpus_have_outputs_and_gradients_of_the_whole(ranks, names, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} CUDA devices are needed, {torch.cuda.device_count()} are here")
    results = spawn("cuda", tmp_path, ranks)
    for name in names:
        check(results, name, "cuda")
