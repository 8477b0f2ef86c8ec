"""``python tests/bench/torch_versions.py PYTHON NEWER``: compare attnlib's CPU calls under two versions of
torch.

PYTHON and NEWER are interpreters, each of which has a torch of its own. Each runs one process, and the two
take turns. In a turn, a process times every case as attnlib computes it and as torch's
``scaled_dot_product_attention`` (SDPA) does, after a check that both compute the same. The table gives the
median of ours / SDPA over the turns. The script exits with 1 if a ratio under NEWER is more than 1.1 times
the one under PYTHON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlib import CAUSAL, attention

TOKENS = (100, 2048)
HEADS, KV_HEADS, CHANNELS = 8, 2, 64
SECONDS = 0.05  # a turn repeats a call for at least this long
BOUND = 1.1


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attnlib's causal attention of tensors ``[b, s, h, d]``."""
    return attention(q, k, v, mask=CAUSAL)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's causal attention of the same tensors."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def cases(tokens: Sequence[int]) -> Iterator[tuple[str, Callable, Callable]]:
    """Yield a name, our call and torch's call for each number of tokens, forward and with backward.

    Raises:
        AssertionError: they do not compute the same.
    """
    for s in tokens:
        tensors = [torch.randn(2, s, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        leaves, dout = [x.clone().requires_grad_() for x in tensors], torch.randn(2, s, HEADS, CHANNELS)

        def forward(call: Callable, tensors: list[Tensor] = tensors) -> tuple[Tensor, ...]:
            return (call(*tensors),)

        def both(call: Callable, leaves: list[Tensor] = leaves, dout: Tensor = dout) -> tuple[Tensor, ...]:
            out = call(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        for what, run in (("forward", forward), ("with backward", both)):
            torch.testing.assert_close(run(ours), run(sdpa), rtol=1e-4, atol=1e-4)
            yield f"{s} tokens, {what}", lambda run=run: run(ours), lambda run=run: run(sdpa)


def seconds(call: Callable) -> float:
    """Return the CPU seconds of one call: wall time would count other work on the machine."""
    calls, start = 0, time.process_time()
    while (taken := time.process_time() - start) < SECONDS:
        call()
        calls += 1
    return taken / calls


def serve(tokens: Sequence[int]) -> None:
    """Print the version of torch; then answer each line of stdin with ours / SDPA by case, as a line of
    JSON.
    """
    torch.set_num_threads(1)
    timed = list(cases(tokens))
    print(torch.__version__, flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: seconds(one) / seconds(other) for name, one, other in timed}), flush=True)


class Server:
    """A process of another interpreter that measures one turn whenever it is asked."""

    def __init__(self, python: str, tokens: Sequence[int]):
        here = Path(__file__).parent
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here)))}
        command = [python, "-c", f"from torch_versions import serve; serve({list(tokens)})"]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._answer()

    def turn(self) -> dict[str, float]:
        """Return ours / SDPA by case."""
        print(file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        if line := self._process.stdout.readline():
            return line.strip()
        self.close()
        raise RuntimeError(f"{self._process.args[0]} ended without an answer; its error stands above")


def compare(older: Server, newer: Server, turns: int) -> bool:
    """Print the table; return whether every case is as fast under the newer torch as the bound demands."""
    taken = [(older.turn(), newer.turn()) for _ in range(turns)]
    print(f"| ours / SDPA, median of {turns} turns | torch {older.version} | torch {newer.version} | ratio |")
    print("|---|---:|---:|---:|")
    ratios = []
    for name in taken[0][0]:
        before, after = (median(turn[name] for turn in served) for served in zip(*taken, strict=True))
        ratios.append(after / before)
        print(f"| {name} | {before:.2f} | {after:.2f} | {ratios[-1]:.2f} |")
    return max(ratios) <= BOUND


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison that the arguments ask for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs=2, metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args(arguments)
    servers = [Server(python, given.tokens) for python in given.pythons]
    try:
        return int(not compare(*servers, given.turns))
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
