"""Small layers with index branches of several families, and their steps over a cache."""

from types import MappingProxyType

import torch
from layer_helpers import Stack, grouped, latent
from torch import Tensor, nn

from attnlib import Indexer, Rope, shared_angles
from attnlib.indexing import Chosen

T = 37
SMALL = {"heads": 4, "head_dim": 8, "top": 6}
BLOCKS = {"head_dim": 8, "block_size": 4, "norms": "rms", "weighted": False}
INDEXERS = MappingProxyType(
    {
        "deepseek": Indexer(**SMALL, source="latent", rope=Rope(4)),
        "of x": Indexer(**SMALL, rope=Rope(4, interleaved=True), rope_place="last", fp32=True),
        "mistral": Indexer(**SMALL, source="normed", query_scale=True),
        "minimax": Indexer(
            heads=2, top=3, **BLOCKS, activation=None, per="group", pool="max", local=1, rope=Rope(8)
        ),
        "qwen": Indexer(heads=2, top=2, **BLOCKS, pool="mean", norm_after_pool=True, tail=True, rope=Rope(4)),
    }
)
LATENT = {"q_lora_rank": 7}


def make(name: str, select: Indexer | None = None, **options) -> nn.Module:
    """A layer with the indexer of this name, or with none."""
    if name in ("deepseek", "mistral"):
        return latent(select=select, **LATENT, **options)
    return grouped(select=select, **options)


def choosing(name: str, seed: int = 1, **options) -> nn.Module:
    """A layer whose index branch has weights that spread the scores."""
    torch.manual_seed(seed)
    layer = make(name, INDEXERS[name], **options)
    for parameter in layer.indexer.parameters():
        nn.init.normal_(parameter)
    return layer


class Reading(Stack):
    """An owner of keys that chooses, and layers that read its keys and choose by index branches of their own.

    ``kv`` has an entry for each layer.
    """

    def __init__(self, name: str, readers: int = 2, **options):
        super().__init__(*(choosing(name, i, own_keys=i == 0, **options) for i in range(readers + 1)))

    def forward(self, x: Tensor, kv=None, **inputs) -> Tensor:
        owner, *readers = self.layers
        if kv is None:
            [angles] = shared_angles([owner], x, cu_seqlens=inputs.get("cu_seqlens"))
            keys = (owner.latent if hasattr(owner, "latent") else owner.key_value)(x, angles)
            x = x + owner(x, keys=keys, **inputs)
        else:
            x = x + owner(x, kv=kv[0])
            keys = kv[0].view()
        for i, reader in enumerate(readers, 1):
            x = x + reader(x, keys=keys, kv=None if kv is None else kv[i], **inputs)
        return x


def without_branch(layer: nn.Module, name: str, **options) -> nn.Module:
    """A layer with the same weights, and no index branch."""
    plain = make(name, **options)
    state = {name: x for name, x in layer.state_dict().items() if not name.startswith("indexer.")}
    plain.load_state_dict(state)
    return plain


def most(layer: nn.Module) -> int:
    """The most tokens that a sequence may have in dense attention."""
    return layer.select.top * layer.select.block_size


def steps(layer: nn.Module, x: Tensor, cache, sizes) -> tuple[Tensor, list[Chosen]]:
    """The output of a layer over dense steps of these sizes, and the choices before each of them."""
    outs, found, at = [], [], 0
    for n in sizes:
        part = x[:, at : at + n]
        with torch.no_grad(), cache.step(n) as kv:
            found.append(layer.choose(part, kv=kv[0]))
            outs.append(layer(part, kv=kv[0]))
        at += n
    return torch.cat(outs, 1), found


def keys_of(chosen: Chosen, t: int) -> Tensor:
    """The keys ``[b, s, c, t]`` of lists, before the causal mask."""
    size = chosen.block_size
    blocks = -(-t // size)
    at = torch.where(chosen.indices >= 0, chosen.indices, blocks).long()
    seen = torch.zeros(*at.shape[:-1], blocks + 1, dtype=torch.bool).scatter_(-1, at, True)
    return seen[..., :-1].repeat_interleave(size, -1)[..., :t]
