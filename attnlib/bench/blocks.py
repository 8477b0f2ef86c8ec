"""Time whole transformer blocks, whose attention is attnlib's or another library's."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .. import CAUSAL, FULL, GroupedQueryAttention, KVView, LayerCache, MultiHeadLatentAttention, Rope
from ..call.call import Call
from ..dispatch.run import Interceptor, Runner
from .cases import Case
from .compare import Cells, agreeing, attempt, compare_calls, in_turns
from .implementations import Implementation, implementation
from .peers import present
from .place import Target
from .report import Line, Table
from .speed import Rows
from .steps import append_random
from .stored import PAGE, cache_for
from .watchdog import watched

PEERS = MappingProxyType({"cpu": ("SDPA",), "cuda": ("SDPA", "cuDNN", "FA4", "Flex")})
SPEED, MEMORY = "1000 tokens/s", "MiB"
CALLS = 4  # of a block in a graph


class BlockCase(NamedTuple):
    """A transformer block, and the sequences that it trains on.

    It decodes for ``decoding`` sequences, each of which has as many ``tokens`` stored. ``latent`` has the
    ranks of the query and KV projections if attention is MLA.
    """

    name: str
    batch: int
    tokens: int
    decoding: int
    width: int
    hidden: int
    heads: int
    kv_heads: int = 1
    latent: tuple[int, int] | None = None
    head: int = 128  # values have this many channels, and so have keys without MLA's rotary channels
    rope: int = 64
    dtype: torch.dtype = torch.bfloat16

    def attention(self, place: Target) -> GroupedQueryAttention | MultiHeadLatentAttention:
        options = {"backend": place.backend, "device": place.device, "dtype": self.dtype, "mask": CAUSAL}
        if self.latent is None:
            sizes = {"num_kv_heads": self.kv_heads, "head_dim": self.head, "rope": Rope(self.head)}
            return GroupedQueryAttention(self.width, self.heads, **sizes, **options)
        q_rank, rank = self.latent
        return MultiHeadLatentAttention(
            self.width, self.heads, q_lora_rank=q_rank, kv_lora_rank=rank, qk_nope_head_dim=self.head,
            qk_rope_head_dim=self.rope, v_head_dim=self.head, rope=Rope(self.rope, interleaved=True),
            **options,
        )  # fmt: skip


LLAMA = MappingProxyType({"width": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8})
DEEPSEEK = MappingProxyType({"width": 7168, "hidden": 18432, "heads": 128, "latent": (1536, 512)})
BLOCKS = (
    BlockCase("Llama-3-8B, 8k", 2, 8192, 16, **LLAMA),
    BlockCase("Llama-3-8B, 32k", 1, 32768, 4, **LLAMA),
    BlockCase("DeepSeek-V3, 8k", 2, 8192, 16, **DEEPSEEK),
    BlockCase("DeepSeek-V3, 32k", 1, 32768, 4, **DEEPSEEK),
)
SMALL = MappingProxyType({"width": 512, "hidden": 1536, "heads": 8, "head": 64, "dtype": torch.float32})
SMALL_BLOCKS = (
    BlockCase("GQA 8/2, 1k", 1, 1024, 4, kv_heads=2, **SMALL),
    BlockCase("MLA, 8 heads, 1k", 1, 1024, 4, latent=(192, 128), rope=32, **SMALL),
)


class Block(nn.Module):
    """A pre-norm transformer block: attention, and an MLP with SwiGLU."""

    def __init__(self, case: BlockCase, place: Target):
        super().__init__()
        options = {"device": place.device, "dtype": case.dtype}
        self.norms: nn.ModuleList = nn.ModuleList(nn.RMSNorm(case.width, **options) for _ in range(2))
        self.attention = case.attention(place)
        self.gate, self.up = (nn.Linear(case.width, case.hidden, bias=False, **options) for _ in range(2))
        self.down: nn.Linear = nn.Linear(case.hidden, case.width, bias=False, **options)

    def forward(self, x: Tensor, **given: object) -> Tensor:
        of_attention, of_mlp = self.norms
        x = x + self.attention(of_attention(x), **given)
        y = of_mlp(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Peer(Interceptor):
    """Another library's attention, in place of the backend of a layer.

    Over a cache it reads the first ``tokens`` of each sequence, all of which one page holds.
    """

    def __init__(self, name: str, place: Target, tokens: int):
        self.name, self._place, self._tokens = name, place, tokens
        self._prepared: dict[Case, Implementation] = {}

    def answer(self, call: Call) -> tuple[Tensor, None]:
        """Return the output of a call, and no LSE."""
        q, k, v = call.q, call.k, call.v
        if call.kv is not None:
            k, v = self._stored(call.kv, len(q))
        (batch, tokens, heads, dim), (*_, kv_heads, width) = q.shape, v.shape
        if call.score.scale is not None:
            q = q * (call.score.scale * dim**0.5)
        mask = CAUSAL if tokens > 1 else FULL  # one new token sees all that are stored
        case = Case("", batch, heads, kv_heads, tokens, dim, width, mask)
        if case not in self._prepared:
            self._prepared[case] = implementation(self.name, case, self._place)
        attend, heads_first = self._prepared[case]
        if not heads_first:
            return attend(q, k, v), None
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None

    def _stored(self, kv: KVView, batch: int) -> tuple[Tensor, Tensor]:
        k, v, *rope = (x[:batch, : self._tokens] for x in (kv.k, kv.v, kv.k_rope) if x is not None)
        return torch.cat((k, *rope), -1) if rope else k, v


def rows(place: Target, tables: Sequence[Table], work: Iterable[BlockCase] = BLOCKS) -> Rows:
    """Yield a row for the training and for the decoding of each block; a table's unit says what it shows."""
    for case in work:
        block = Block(case, place)
        for what, measure in (("training", training), ("decoding", decoding)):
            with watched(f"{tables[0].name}, {case.name}, {what}"):
                found = measure(place, case, block)
            for table in tables:
                if found.get(table.unit):
                    yield table, Line(f"{case.name}, {what}", found[table.unit])
        del block
        place.tidy()


def training(place: Target, case: BlockCase, block: Block) -> dict[str, Cells]:
    """Return the speed of forward and backward with each library's attention, and their peak memory."""
    x = torch.randn(case.batch, case.tokens, case.width, device=place.device, dtype=case.dtype)
    x.requires_grad_()
    backends = {"ours": place.backend} | {name: Peer(name, place, 0) for name in present(PEERS[place.device])}
    runs = {name: partial(_trained, block, backend, x) for name, backend in backends.items()}
    runs = agreeing(runs, lambda run: run())
    taken = in_turns(runs, place.seconds, place.rounds, place.budget)
    held = {name: attempt(place.peak, run) for name, run in runs.items()} if place.peak else {}
    mib = {name: attempt(lambda n: n / 2**20, n) for name, n in held.items()}
    return {SPEED: _speeds(taken, case.batch * case.tokens), MEMORY: mib}


def _trained(block: Block, backend: Runner, x: Tensor) -> list[Tensor]:
    """Return a block's output, and the gradients of its input and of all weights."""
    block.attention.backend = backend
    out = block(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *block.parameters()], out)]


@torch.no_grad()
def decoding(place: Target, case: BlockCase, block: Block) -> dict[str, Cells]:
    """Return the speed of one new token per sequence; attnlib reads pages, and others read whole tensors."""
    x = torch.randn(case.decoding, 1, case.width, device=place.device, dtype=case.dtype)
    with ExitStack() as steps:
        pages, whole = (_stored(place, case, block, size, steps) for size in (PAGE, None))
        backends = {"ours": (place.backend, pages)}
        backends |= {name: (Peer(name, place, case.tokens), whole) for name in present(PEERS[place.device])}
        makers = {name: partial(partial, _decoded, block, *one, x) for name, one in backends.items()}
        taken = compare_calls(place, makers, captured=CALLS if place.capture else 0)
    return {SPEED: _speeds(taken, case.decoding)}


def _stored(
    place: Target, case: BlockCase, block: Block, page_size: int | None, steps: ExitStack
) -> LayerCache:
    """Return a cache of all tokens but the last, in a step that appends it; all caches hold the same."""
    attention = block.attention
    cache = cache_for([attention.kv_layout], case.decoding, case.tokens, page_size, place.device)
    cache.admit(case.decoding)
    torch.manual_seed(0)
    with cache.step(case.tokens - 1) as (kv,):
        append_random(place, kv, attention.rope)
    return steps.enter_context(cache.step(1))[0]


def _decoded(block: Block, backend: Runner, kv: LayerCache, x: Tensor) -> Tensor:
    block.attention.backend = backend
    return block(x, kv=kv)


def _speeds(seconds: Cells, tokens: int) -> Cells:
    return {name: attempt(lambda x: tokens / x / 1e3, x) for name, x in seconds.items()}
