"""``python tests/bench/choosing_speed.py``: what an index branch costs, with 64 heads of 128, on a GPU.

First the scores of 4k queries for 32k keys, and the choice of 2,048 keys for each. Then decoding steps over
pages, in CUDA graphs: the choice among stored index keys, attention over the chosen latents by 128 heads,
both, and dense attention. Then the memory that a prompt of 128k tokens takes beyond its lists.
"""

from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from attnlib import CAUSAL, Indexer, KVCache, KVLayout, KVView, cached_attention
from attnlib.bench.place import cuda, gpu_capture
from attnlib.indexing import Chosen, StoredKeys, choose
from attnlib.indexing.scores import index_scores

INDEXER = Indexer(64, 128, top=2048)
LAYOUT = KVLayout.latent(512, 64, dtype=torch.bfloat16, index_dim=128)
CHECKED, CALLS, PART = 8, 10, 8192


def random(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def by_torch(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The scores of the last queries, in fp32."""
    products = torch.einsum("shd,td->sht", queries[0, -CHECKED:].float(), keys[0].float()).relu()
    scores = torch.einsum("sht,sh->st", products, weights[0, -CHECKED:]) * INDEXER.score_scale
    return scores.masked_fill(
        torch.ones_like(scores, dtype=torch.bool).triu(keys.shape[1] - CHECKED + 1), -torch.inf
    )


def prompt(s: int, t: int) -> Iterator[str]:
    """The time of scores, and of choosing."""
    queries, keys, weights = random(1, s, 64, 128), random(1, t, 128), torch.randn(1, s, 64, device="cuda")
    ends = torch.arange(t - s + 1, t + 1, device="cuda", dtype=torch.int32)[None]
    found = index_scores(queries, keys, weights, ends, INDEXER)[0, -CHECKED:, 0]
    torch.testing.assert_close(found, by_torch(queries, keys, weights), rtol=1e-3, atol=1e-3)
    del found
    seconds = cuda().seconds(lambda: index_scores(queries, keys, weights, ends, INDEXER))
    speed = 2 * 64 * 128 * ends.sum().item() / seconds / 1e12
    yield f"scores of {s} x {t}: {1e3 * seconds:.2f} ms, {speed:.0f} TFLOP/s"
    yield f"choosing: {1e3 * cuda().seconds(lambda: choose(queries, keys, weights, INDEXER)):.2f} ms"


def stored(b: int, t: int) -> KVView:
    """The view of a decoding step over random tokens."""
    cache = KVCache.paged([LAYOUT], pages=b * t // 64, page_size=64, max_sequences=b, device="cuda")
    cache.admit(b)
    for s in (*[PART] * (t // PART - 1), PART - 1, 1):
        with cache.step(s) as (kv,):
            view = kv.append(random(b, s, 512), random(b, s, 64), index=random(b, s, 1, 128))
    return view


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call in a CUDA graph: the median of replays."""
    replay = gpu_capture(call, CALLS)
    return 1e6 * median(cuda().seconds(replay) for _ in range(3)) / CALLS


def step(b: int, t: int) -> str:
    """A row of the table of decoding steps."""
    view, q = stored(b, t), random(b, 1, 128, 576)
    queries, weights = random(b, 1, 64, 128), torch.randn(b, 1, 64, device="cuda")

    def chosen(keys: StoredKeys | Tensor) -> Chosen:
        return Chosen(choose(queries, keys, weights, INDEXER, lengths=view.lengths))

    def attend(choice: Chosen) -> Tensor:
        return cached_attention(q, view, mask=CAUSAL & choice.mask)

    in_place, gathered = StoredKeys.of(view, t), view.index_keys()[:, :, 0]
    choice, other = chosen(in_place), chosen(gathered)
    assert torch.equal(choice.indices.sort(-1).values, other.indices.sort(-1).values)
    actions = (lambda: chosen(in_place), lambda: attend(choice), lambda: attend(chosen(in_place)))
    times = [microseconds(action) for action in (*actions, lambda: attend(Chosen(None)))]
    *_, both, dense = times
    return f"| {b} x {t} | {' | '.join(f'{x:.0f}' for x in times)} | {both / dense:.2f} |"


def memory(t: int) -> str:
    """What choosing takes beyond its arguments and the lists."""
    given = random(1, t, 64, 128), random(1, t, 128), torch.randn(1, t, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lists = choose(*given, INDEXER)
    taken = torch.cuda.max_memory_allocated() - before - lists.nbytes
    return f"prompt of {t}: {taken / 2**30:.2f} GiB beyond {lists.nbytes / 2**30:.2f} GiB of lists"


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(*prompt(4096, 32768), sep="\n", flush=True)
    print("| us | choosing | attention | both | dense | ratio |\n|---|---:|---:|---:|---:|---:|")
    for tokens in (32768, 131072):
        print(step(8, tokens), flush=True)
    print(memory(131072))
