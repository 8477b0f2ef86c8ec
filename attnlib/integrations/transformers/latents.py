"""Absorbed decoding for transformers models with a latent cache (MLA: DeepSeek-V2 and its successors).

transformers caches latents and rotary keys, but each layer expands all of them at every step, in its method
``expand_kv``. If that method returns the cached tensors instead, attention can absorb the up-projections into
its queries and outputs.
"""

from types import MethodType

import torch
from torch import Tensor, nn

from ...layers.latent_forms import cheaper_form
from .families import FAMILIES

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def keep_latents(model: nn.Module, name: str) -> None:
    """Make the MLA layers of a model pass their latents to the attention implementation ``name`` unexpanded.

    Raises:
        ValueError: the model has no MLA layer.
        NotImplementedError: its layers select keys with an unknown indexer.
    """
    found = [
        module
        for module in model.modules()
        if hasattr(type(module), "expand_kv") and all(hasattr(module, x) for x in ("kv_b_proj", *SIZES))
    ]
    if not found:
        raise ValueError(
            f"model: expected one with MLA layers, such as DeepSeek-V3, got {type(model).__name__}"
        )
    for module in found:
        family = FAMILIES.get((module.config.model_type, "self"))
        if family is not None and family.select is not None:
            continue
        if any("indexer" in part.lower() for part, _ in module.named_children()):
            raise NotImplementedError(
                f"model: {type(module).__name__} selects keys with an indexer, which attnlib does not support"
            )
    for module in found:
        module.expand_kv = MethodType(_passing_latents(name), module)


def _passing_latents(name: str):
    def expand_kv(self: nn.Module, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached tensors; expand them for gradients or for another attention implementation."""
        grad = torch.is_grad_enabled() and (latent.requires_grad or self.kv_b_proj.weight.requires_grad)
        if self.config._attn_implementation == name and not grad:
            return k_rope, latent
        return type(self).expand_kv(self, latent, k_rope)

    return expand_kv


def keeps_latents(model: nn.Module) -> bool:
    """True if :func:`keep_latents` has made every MLA layer pass its latents to attention unexpanded."""
    found = [
        module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    ]
    return bool(found) and all("expand_kv" in vars(module) or hasattr(module, "layer") for module in found)


def are_latents(query: Tensor, key: Tensor) -> bool:
    """True if keys and values are rotary keys and latents, which are not as wide as the queries."""
    return key.shape[-1] != query.shape[-1]


def expanded(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Expand rotary keys ``key`` and latents ``value`` to ordinary keys and values."""
    return type(module).expand_kv(module, value, key)


def may_absorb(module: nn.Module, query: Tensor, keys: int) -> bool:
    """True if absorbing ``kv_b_proj`` into the queries is possible and cheaper than expanding ``keys`` keys.

    Raises:
        ValueError: the weight is sharded, but not by whole heads.
    """
    if not can_absorb(module, query):
        return False
    rank, nope, rope, value = (getattr(module, name) for name in SIZES)
    return cheaper_form(query.shape[2], keys, rank=rank, nope=nope, rope=rope, value=value) == "absorbed"


def can_absorb(module: nn.Module, query: Tensor) -> bool:
    """True if absorbing ``kv_b_proj`` into queries ``[b, h, s, d]`` is possible.

    ``kv_b_proj`` must be an ordinary linear layer; others, such as LoRA's, use more than the weight.

    Raises:
        ValueError: the weight is sharded, but not by whole heads.
    """
    projection, heads = module.kv_b_proj, query.shape[1]
    if type(projection) is not nn.Linear or type(projection.weight) not in (Tensor, nn.Parameter):
        return False
    if projection.bias is not None or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    rank, nope, _, value = (getattr(module, name) for name in SIZES)
    if projection.weight.shape != (heads * (nope + value), rank):
        raise ValueError(
            f"kv_b_proj: expected [{heads * (nope + value)}, {rank}] for {heads} heads like q, "
            f"got {tuple(projection.weight.shape)}; shard both by whole heads"
        )
    return True


def require_absorption(module: nn.Module, query: Tensor) -> None:
    """Raise NotImplementedError if ``kv_b_proj`` cannot be absorbed, which chosen keys in pages need."""
    if not can_absorb(module, query):
        raise NotImplementedError(
            "kv_b_proj: expected a plain nn.Linear without bias, hooks and adapters, which attention to "
            f"chosen keys in pages absorbs, got {type(module.kv_b_proj).__name__}; use a DynamicCache"
        )


def absorbed(module: nn.Module, q: Tensor) -> Tensor:
    """Project queries ``[..., h, n + p]`` into latent space, ``[..., h, r + p]``; rotary channels stay."""
    nope, rope = q.split((module.qk_nope_head_dim, module.qk_rope_head_dim), -1)
    return torch.cat((torch.einsum("...hn,hnr->...hr", nope, _ups(module)[0]), rope), -1)


def unabsorbed(module: nn.Module, out: Tensor) -> Tensor:
    """Project outputs in latent space ``[..., h, r]`` to value heads ``[..., h, e]``."""
    return torch.einsum("...hr,her->...he", out, _ups(module)[1])


def _ups(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the up-projections of keys ``[h, n, r]`` and of values ``[h, e, r]`` as views of the weight."""
    sizes = module.qk_nope_head_dim, module.v_head_dim
    return module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
