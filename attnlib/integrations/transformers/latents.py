"""Absorbed decoding for models of transformers whose cache holds latents (DeepSeek-V2 and what came of it).

transformers stores latents and rotary keys, and expands all of them at every step, in a method of each layer.
Where this hands on what is stored, attention can absorb the up-projections into its queries and outputs.
"""

from types import MethodType

import torch
from torch import Tensor, nn

from ...layers.latent_forms import cheaper_form

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def keep_latents(model: nn.Module, name: str) -> None:
    """Have the layers over latents hand these to attention as they are, where it is called ``name``.

    Raises:
        ValueError: the model has no such layer.
        NotImplementedError: they choose keys by an indexer.
    """
    found = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    found = [module for module in found if all(hasattr(module, x) for x in ("kv_b_proj", *SIZES))]
    if not found:
        raise ValueError(
            f"model: expected one with layers over latents, as DeepSeek-V3, got {type(model).__name__}"
        )
    for module in found:
        if any("indexer" in part.lower() for part, _ in module.named_children()):
            raise NotImplementedError(
                f"model: {type(module).__name__} chooses keys by an indexer, which attnlib lacks"
            )
    for module in found:
        module.expand_kv = MethodType(_kept(name), module)


def _kept(name: str):
    def expand_kv(self: nn.Module, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored, for attention of this name and without a gradient; else keys and values."""
        grad = torch.is_grad_enabled() and (latent.requires_grad or self.kv_b_proj.weight.requires_grad)
        if self.config._attn_implementation == name and not grad:
            return k_rope, latent
        return type(self).expand_kv(self, latent, k_rope)

    return expand_kv


def keeps_latents(model: nn.Module) -> bool:
    """Whether the layers over latents of a model hand these on."""
    found = [
        module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    ]
    return bool(found) and all("expand_kv" in vars(module) or hasattr(module, "layer") for module in found)


def are_latents(query: Tensor, key: Tensor) -> bool:
    """Whether these are a rotary key and, as values, latents: keys are as wide as queries else."""
    return key.shape[-1] != query.shape[-1]


def expanded(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, of rotary keys and latents."""
    return type(module).expand_kv(module, value, key)


def may_absorb(module: nn.Module, query: Tensor, keys: int) -> bool:
    """Whether absorbing is cheaper over so many ``keys``, and ``kv_b_proj`` is a plain weight.

    Of others, such as one with LoRA, nobody knows what they add to the weight.

    Raises:
        ValueError: it is sharded, but not by whole heads.
    """
    projection, (_, heads, queries, _) = module.kv_b_proj, query.shape
    if type(projection) is not nn.Linear or type(projection.weight) not in (Tensor, nn.Parameter):
        return False
    if projection.bias is not None or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    rank, nope, rope, value = (getattr(module, name) for name in SIZES)
    if projection.weight.shape != (heads * (nope + value), rank):
        raise ValueError(
            f"kv_b_proj: expected [{heads * (nope + value)}, {rank}] for {heads} heads like q, "
            f"got {tuple(projection.weight.shape)}; shard both by whole heads"
        )
    return cheaper_form(queries, keys, rank=rank, nope=nope, rope=rope, value=value) == "absorbed"


def absorbed(module: nn.Module, q: Tensor) -> Tensor:
    """Queries ``[..., h, n + p]`` as they meet latents and rotary keys, ``[..., h, r + p]``."""
    nope, rope = q.split((module.qk_nope_head_dim, module.qk_rope_head_dim), -1)
    return torch.cat((torch.einsum("...hn,hnr->...hr", nope, _ups(module)[0]), rope), -1)


def unabsorbed(module: nn.Module, out: Tensor) -> Tensor:
    """``[..., h, r]`` as values, ``[..., h, e]``."""
    return torch.einsum("...hr,her->...he", out, _ups(module)[1])


def _ups(module: nn.Module) -> tuple[Tensor, ...]:
    """The up-projections of keys ``[h, n, r]`` and of values ``[h, e, r]``, views of one weight."""
    sizes = module.qk_nope_head_dim, module.v_head_dim
    return module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
