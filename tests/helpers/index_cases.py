"""The index branches of six families: as an Indexer, as transformers has them, and as an oracle."""

from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.hy_v4 import modeling_hy_v4
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
from transformers.models.mistral_large4 import modeling_mistral_large4
from transformers.models.qwen4_exp import modeling_qwen4_exp

from attnlib import Indexer, Rope
from attnlib.indexing import IndexBranch, IndexTensors

HIDDEN, RANK, HEADS, WIDTH, ROTATED, TOP, SIZE = 24, 20, 4, 16, 8, 6, 4
SIZES = {"heads": HEADS, "head_dim": WIDTH, "top": TOP}
HALF, PAIRS = Rope(ROTATED), Rope(ROTATED, interleaved=True)
BLOCKS = {"block_size": SIZE, "norms": "rms", "weighted": False, "rope": HALF}
INDEXERS = MappingProxyType(
    {
        "deepseek_v32": Indexer(**SIZES, source="latent", rope=HALF),
        "glm_moe_dsa": Indexer(**SIZES, source="latent", rope=PAIRS),
        "hy_v4": Indexer(**SIZES, source="latent", rope=HALF, rope_place="last", fp32=True),
        "mistral_large4": Indexer(**SIZES, source="normed", query_scale=True, rope=PAIRS),
        "mistral_large4 without rope": Indexer(**SIZES, source="normed", query_scale=True),
        "minimax_m3": Indexer(
            **SIZES, **BLOCKS, activation=None, scale=1.0, per="group", pool="max", local=2
        ),
        "qwen4_exp": Indexer(**SIZES, **BLOCKS, pool="mean", norm_after_pool=True, tail=True),
    }
)
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, q_lora_rank=RANK, qk_rope_head_dim=ROTATED, rms_norm_eps=1e-6,
    index_n_heads=HEADS, index_head_dim=WIDTH, index_topk=TOP, index_block_size=SIZE, index_topk_blocks=TOP,
    index_local_blocks=2, indexer_n_heads=HEADS, indexer_kv_heads=1, indexer_head_dim=WIDTH,
    indexer_budget=TOP * SIZE, indexer_compress_ratio=SIZE, no_rope_layers=[1, 0],
)  # fmt: skip
MODULES: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "deepseek_v32": lambda: modeling_deepseek_v32.DeepseekV32Indexer(CONFIG, 0),
        "glm_moe_dsa": lambda: modeling_glm_moe_dsa.GlmMoeDsaIndexer(CONFIG, 0),
        "hy_v4": lambda: modeling_hy_v4.HYV4Indexer(CONFIG, 0),
        "mistral_large4": lambda: modeling_mistral_large4.MistralLarge4TextIndexer(CONFIG, 0),
        "mistral_large4 without rope": lambda: modeling_mistral_large4.MistralLarge4TextIndexer(CONFIG, 1),
        "minimax_m3": lambda: modeling_minimax_m3_vl.MiniMaxM3VLIndexer(CONFIG, 0),
        "qwen4_exp": lambda: modeling_qwen4_exp.Qwen4ExpTextQSAIndexer(CONFIG, 0),
    }
)
RENAMED = {"wq_b": "q_proj", "wk": "k_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
RENAMED |= {"softmax_scaling.scale": "query_scale", "softmax_scaling.bias": "query_bias"}


class Family(NamedTuple):
    """An index branch of ours and of transformers, with the same weights."""

    name: str
    branch: IndexBranch
    theirs: nn.Module

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float32) -> "Family":
        indexer, theirs = INDEXERS[name], MODULES[name]()
        for x in theirs.parameters():
            nn.init.normal_(x, std=0.5)
        rank = RANK if indexer.source == "latent" else None
        branch = IndexBranch(indexer, HIDDEN, q_lora_rank=rank, dtype=dtype)
        branch.load_state_dict(renamed(theirs.state_dict(), one_more=indexer.norms == "rms"))
        return cls(name, branch, theirs)

    def tensors(self, x: Tensor, latent: Tensor, first: int = 0) -> IndexTensors:
        """The index tensors of tokens ``[b, s, m]`` from position ``first`` on."""
        indexer, positions = self.branch.indexer, torch.arange(first, first + x.shape[1])
        angles = None if indexer.rope is None else indexer.rope.angles(positions)
        given = latent if indexer.source == "latent" else None
        return self.branch(x, given, angles=angles, positions=positions)

    def their_choice(self, x: Tensor, latent: Tensor) -> Tensor:
        """What transformers chooses, as bool ``[b, s, c, t]`` of tokens."""
        (b, t), indexer = x.shape[:2], self.branch.indexer
        causal, positions = torch.ones(t, t, dtype=torch.bool).tril(), torch.arange(t).expand(b, t)
        angles = HALF.angles(positions)
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos, angles.sin))
        if self.name == "qwen4_exp":
            mask = causal.expand(b, 1, t, t)
            return self.theirs(x, (cos, sin), mask, None)[:, 0, :, None] & causal[:, None]
        if self.name == "minimax_m3":
            blocks = self.theirs(x, (cos, sin), None, positions).transpose(1, 2)
            return shown(blocks, t, indexer.block_size) & causal[:, None]
        given = (x, latent) if indexer.source == "latent" else (x,)
        chosen = self.theirs(*given, (cos, sin), causal.expand(b, t, t), positions)
        return shown(chosen[:, :, None], t) & causal[:, None]


def renamed(state: dict[str, Tensor], *, one_more: bool) -> dict[str, Tensor]:
    """The state dict of a branch from one of transformers, whose RMS norms store weights minus 1."""
    found = {}
    for name, x in state.items():
        for old, new in RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        found[name] = x + 1 if one_more and "norm" in name else x
    if (both := found.pop("index_qk_proj.weight", None)) is not None:
        found["q_proj.weight"], found["k_proj.weight"] = both.split((HEADS * WIDTH, WIDTH))
    return found


def shown(lists: Tensor, t: int, size: int = 1) -> Tensor:
    """The keys ``[b, s, c, t]`` that lists ``[b, s, c, n]`` show, in blocks of ``size`` keys."""
    blocks = -(-t // size)
    at = torch.where(lists >= 0, lists, blocks).long()
    seen = torch.zeros(*lists.shape[:-1], blocks + 1, dtype=torch.bool).scatter_(-1, at, True)
    return seen[..., :-1].repeat_interleave(size, -1)[..., :t]
