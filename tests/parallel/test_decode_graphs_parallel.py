"""On several GPUs a captured graph decodes over a cache that they share, as eager steps do over one that each
has whole.
"""

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import destroy_process_group, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from attnlib import CAUSAL, GroupedQueryAttention, KVCache, MultiHeadLatentAttention, Rope

RANKS = (2, 4, 8)
HIDDEN, HEADS = 256, 16
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LAYERS = {
    "mla": lambda: MultiHeadLatentAttention(HIDDEN, HEADS, mask=CAUSAL, rope=Rope(64), **LATENT),
    "mqa": lambda: GroupedQueryAttention(
        HIDDEN, HEADS, num_kv_heads=1, head_dim=64, mask=CAUSAL, rope=Rope(64)
    ),
}
STEPS = {"one token each": 1, "drafts": 4}


class Decoder:
    """A layer and its cache, which takes a prompt and then steps of one shape."""

    def __init__(self, layer: torch.nn.Module, device: torch.device, tokens: int, **options):
        self.layer, self.tokens = layer, tokens
        sizes = {"pages": 64, "page_size": 16, "max_sequences": 3, "max_length": 512}
        self.cache = KVCache.paged([layer.kv_layout], **sizes, **options, device=device)
        self.handles = self.cache.admit(3)
        self.x = torch.zeros(3, tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        self.y = torch.zeros_like(self.x)
        self.graph: torch.cuda.CUDAGraph | None = None

    def prompt(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        with self.cache.step(dict(zip(self.handles, lengths, strict=True))) as (kv,):
            return self.layer(x, kv=kv)

    def step(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        with self.cache.step(self.tokens, replay=self.graph is not None) as (kv,):
            if self.graph is None:
                self.y.copy_(self.layer(self.x, kv=kv))
            else:
                self.graph.replay()
        return self.y

    def capture(self, x: Tensor) -> Tensor:
        """A step that is captured, and then run."""
        self.x.copy_(x)
        graph = torch.cuda.CUDAGraph()
        with self.cache.step(self.tokens) as (kv,):
            with torch.cuda.graph(graph):
                self.y.copy_(self.layer(self.x, kv=kv))
            graph.replay()
        self.graph = graph
        return self.y


def compare(make, device: torch.device, tokens: int) -> None:
    """Both decoders say the same: eagerly, while a graph is captured, and when it is replayed over other
    lengths.
    """
    mesh = init_device_mesh(device.type, (get_world_size(),))
    torch.manual_seed(0)
    truth = make().to(device, torch.bfloat16)
    torch.manual_seed(0)
    layer = make().to(device, torch.bfloat16)
    layer = parallelize_module(layer, mesh, layer.parallel_plan(mesh))
    ours, theirs = Decoder(layer, device, tokens, mesh=mesh), Decoder(truth, device, tokens)
    lengths = (33, 100, 7)
    x = torch.randn(sum(lengths), HIDDEN, device=device, dtype=torch.bfloat16)
    pairs = [(ours.prompt(x, lengths), theirs.prompt(x, lengths))]
    for n in range(8):
        x = torch.randn(3, tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        act = ours.capture if n == 2 and device.type == "cuda" else ours.step
        pairs.append((act(x).clone(), theirs.step(x).clone()))
        if n == 5:  # other pages and lengths under the same graph
            for decoder in (ours, theirs):
                decoder.cache.truncate(decoder.handles[1], 40)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def work(rank: int, ranks: int, device: str, file: str) -> None:
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    torch.set_grad_enabled(False)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    for make in LAYERS.values():
        for tokens in STEPS.values():
            compare(make, here, tokens)
    destroy_process_group()


@pytest.mark.gpu2
@pytest.mark.parametrize("ranks", RANKS)
def test_a_graph_replays_over_a_cache_that_gpus_share(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} CUDA devices are needed, {torch.cuda.device_count()} are here")
    mp.spawn(work, (ranks, "cuda", str(tmp_path / "store")), nprocs=ranks)
