"""``python tests/bench/weight_tiles.py [64 128 256]``: tiles of ``maxima`` and ``mass`` to choose from.

On a GPU, each is compared with the tiles of the table, and timed beside our forward of the same causal call
of 8k tokens and 16 heads in bf16. The winners go into backends/_triton/dense/tables.py.
"""

import sys
from types import MappingProxyType
from unittest.mock import patch

import torch

from attnlib import CAUSAL, attention_maxima, attention_weights, attention_with_lse
from attnlib.backends._triton.dense import tables
from attnlib.backends._triton.launching.config import LaunchConfig as Tiles
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.bench.compare import attempt, distance
from attnlib.bench.place import cuda

TOKENS, HEADS = 8192, 16
CANDIDATES = MappingProxyType(
    {
        "maxima": (
            *(
                Tiles(128, 128, 2, 8, tma=True),
                Tiles(128, 128, 3, 8, tma=True),
                Tiles(128, 64, 4, 8, tma=True),
            ),
            *(Tiles(64, 128, 3, 4, tma=True), Tiles(64, 64, 2, 4, tma=True), Tiles(128, 256, 2, 8, tma=True)),
        ),
        "mass": (
            *(Tiles(64, 128, 4, 4, tma=True), Tiles(64, 128, 2, 4, tma=True), Tiles(32, 128, 2, 4, tma=True)),
            *(Tiles(64, 128, 2, 8, tma=True), Tiles(64, 64, 2, 4, tma=True), Tiles(64, 64, 3, 4, tma=True)),
            *(Tiles(128, 128, 2, 8, tma=True, registers=128), Tiles(128, 128, 2, 8, tma=True)),
            *(Tiles(64, 128, 3, 8, tma=True, registers=128), Tiles(64, 64, 2, 8, tma=True)),
        ),
    }
)


def main(dims: list[int]) -> None:
    """Print the milliseconds of all tiles that fit, and the share of the forward's time."""
    place = cuda()
    for d in dims:
        q, k, v = (torch.randn(1, TOKENS, HEADS, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        lse = attention_with_lse(q, k, v, mask=CAUSAL)[1]
        calls = {
            "maxima": lambda q=q, k=k: attention_maxima(q, k, mask=CAUSAL),
            "mass": lambda q=q, k=k, lse=lse: attention_weights(q, k, lse, mask=CAUSAL, over="queries"),
        }
        forward = place.seconds(lambda q=q, k=k, v=v: attention_with_lse(q, k, v, mask=CAUSAL))
        print(f"d = {d}: forward {forward * 1e3:.3f} ms", flush=True)
        for name, call in calls.items():
            expected = call()
            for tiles in CANDIDATES[name]:
                with patch.object(tables, name, lambda case, *, keys, tiles=tiles: tiles):
                    plan_cache.cache_clear()
                    error = attempt(lambda call=call, expected=expected: distance([call()], [expected]))
                    taken = attempt(place.seconds, call) if isinstance(error, float) else error
                if isinstance(taken, float):
                    taken = (
                        f"{taken * 1e3:.3f} ms, {taken / forward:.2f} of the forward, differs by {error:.0e}"
                    )
                print(f"  {name} {tiles}: {taken}", flush=True)
                plan_cache.cache_clear()


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [128])
