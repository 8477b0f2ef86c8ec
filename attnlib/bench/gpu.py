"""The GPU cases: our forward against torch's fused attentions and FlexAttention, timed in turns in one run."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ..functional import attention
from ..mask import CAUSAL, FULL


class Case(NamedTuple):
    """Self-attention in bf16: batch, query and KV heads, tokens, channels of keys and of values."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    value_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of the forward pass, halved when causal, as the FlashAttention papers count."""
        pairs = self.batch * self.heads * self.tokens**2
        return 2 * pairs * (self.dim + self.value_dim) / (2 if self.causal else 1)


CASES = (
    Case("d128 full 8k", 2, 16, 16, 8192, 128, 128, False),
    Case("d128 causal 8k", 2, 16, 16, 8192, 128, 128, True),
    Case("d64 full 8k", 2, 32, 32, 8192, 64, 64, False),
    Case("d64 causal 8k", 2, 32, 32, 8192, 64, 64, True),
    Case("d256 causal 8k", 2, 8, 8, 8192, 256, 256, True),
    Case("GQA 32/8 d128 causal 4k", 4, 32, 8, 4096, 128, 128, True),
    Case("d128 causal 1k", 16, 16, 16, 1024, 128, 128, True),
    Case("d128 causal 32k", 1, 16, 16, 32768, 128, 128, True),
    Case("MLA 192/128 causal 8k", 2, 16, 16, 8192, 192, 128, True),
)
PEERS = ("cuDNN", "FA2", "Flex")


class Row(NamedTuple):
    """TFLOP/s of ours and of each peer; None where a peer refuses."""

    case: Case
    ours: float
    peers: dict[str, float | None]


def rows() -> Iterator[Row]:
    """Every case, after checking that every peer computes the same."""
    for case in CASES:
        q, k, v = _tensors(case)
        ours = lambda q=q, k=k, v=v, case=case: attention(q, k, v, mask=CAUSAL if case.causal else FULL)  # noqa: E731
        calls = {"ours": ours} | {name: peer for name in PEERS if (peer := _peer(name, case, q, k, v)) is not None}
        for name, call in calls.items():
            error = (call().float() - ours().float()).norm() / ours().float().norm()
            if not error < 1e-2:
                raise RuntimeError(f"{case.name}: {name} differs from ours by {error:.1e}")
        speed = {name: case.flops / seconds / 1e12 for name, seconds in _in_turns(calls).items()}
        yield Row(case, speed["ours"], {name: speed.get(name) for name in PEERS})
        torch._dynamo.reset()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, with our speed as a ratio to each peer's."""
    lines = [f"| bf16 forward | ours, TFLOP/s | {' | '.join(PEERS)} |", "|---|---:|" + "---:|" * len(PEERS)]
    for row in rows:
        cells = [f"{speed:.0f} ({row.ours / speed:.2f}x)" if speed else "refuses" for speed in row.peers.values()]
        lines.append(f"| {row.case.name} | {row.ours:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _tensors(case: Case) -> list[Tensor]:
    sizes = ((case.heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim))
    return [torch.randn(case.batch, case.tokens, *size, device="cuda", dtype=torch.bfloat16) for size in sizes]


def _peer(name: str, case: Case, *tensors: Tensor) -> Callable[[], Tensor] | None:
    """The peer's call, on tensors with heads first as it wants them; None if it refuses the case."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
    grouped = case.heads != case.kv_heads
    if name == "Flex":
        compiled = torch.compile(flex_attention, dynamic=False)
        sizes = {"Q_LEN": case.tokens, "KV_LEN": case.tokens, "device": "cuda"}
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, **sizes) if case.causal else None
        return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped).transpose(1, 2)
    if name == "FA2" and case.dim != case.value_dim:
        return None
    backend = SDPBackend.CUDNN_ATTENTION if name == "cuDNN" else SDPBackend.FLASH_ATTENTION

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _in_turns(calls: dict[str, Callable], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each call over rounds in which all take turns: clocks drift under load."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=10, rep=40, return_mode="median") / 1e3)
    return {name: median(taken) for name, taken in times.items()}
