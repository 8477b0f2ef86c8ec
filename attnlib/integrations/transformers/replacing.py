"""Layers of attnlib in the place of a model's own attention: what the model calls them with, and its weights'
names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from ...masks.band import FULL, Mask
from ...rope.rope import Angles, Rope
from ...rope.scaling import LongRoPE
from .attention import attention_forward
from .building import family_of, layer_from, layer_type
from .families import FAMILIES, Family
from .latents import SIZES
from .weights import rename_loaded, rename_saved, theirs_of


class ReplacedAttention(nn.Module):
    """``layer`` of attnlib, as a model of transformers calls its attention."""

    def __init__(self, layer: nn.Module, family: Family, config: Any, index: int):
        super().__init__()
        self.layer = layer
        self.family = family
        self.config: Any = config
        self.layer_idx: int = index
        self.is_causal: bool = layer.mask != FULL
        self.sliding_window: int | None = layer.mask.kept[0] if isinstance(layer.mask, Mask) else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        cache: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Of ``hidden_states`` ``[b, s, m]``, and as many None as the model expects beside it.

        T5 calls its mask ``mask``, and hands a bias that is 0 from layer to layer. The ``cache`` was called
        ``past_key_values`` before transformers 5.24; GPT-NeoX calls it ``layer_past``.
        """
        older = [kwargs.pop(name, None) for name in ("past_key_values", "layer_past")]
        cache = next((x for x in (cache, *older) if x is not None), None)
        angles = self._angles(position_embeddings, kwargs.get("position_ids"))
        at = self._positions(hidden_states, kwargs.get("position_ids"), cache)
        q = self._query(hidden_states, angles, at)
        key, value = self._stored(hidden_states, angles, cache, key_value_states)
        out, _ = attention_forward(
            self,
            q,
            key,
            value,
            mask if attention_mask is None else attention_mask,
            dropout=self.layer.dropout_p if self.training else 0.0,
            scaling=self.layer.scale,
            softcap=getattr(self.layer, "softcap", None),
            s_aux=getattr(self.layer, "sinks", None),
            **kwargs | {"is_causal": self.is_causal, "sliding_window": self.sliding_window},
        )
        out = self.layer.o_proj(out.flatten(-2))
        if self.family.residual_dropout is not None:
            p = getattr(self.config, self.family.residual_dropout)
            out = nn.functional.dropout(out, p, training=self.training)
        return (out, None) if self.family.returns == 2 else (out, position_bias, None)

    def _angles(self, theirs: Angles | None, position_ids: Tensor | None) -> Angles | None:
        """Those that the model made for all layers, if this one turns."""
        return None if self.layer.rope is None else theirs

    def _positions(self, x: Tensor, position_ids: Tensor | None, cache: Any) -> Tensor | None:
        """What a temperature counts: positions, or all tokens of a row."""
        if self.layer.temperature is None or not self.family.counts_padding:
            return position_ids
        stored = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        return torch.arange(x.shape[1], device=x.device) + stored

    def _query(self, x: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        """``[b, h, s, d]``."""
        return self.layer.query(x, angles, positions).transpose(1, 2)

    def _stored(
        self, x: Tensor, angles: Angles | None, cache: Any, source: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of x and of what is cached; of a ``source`` in cross-attention, which is cached
        once.
        """
        is_stored = False
        if isinstance(cache, EncoderDecoderCache):
            is_stored = source is not None and cache.is_updated.get(self.layer_idx)
            if source is not None:
                cache.is_updated[self.layer_idx] = True
            cache = cache.self_attention_cache if source is None else cache.cross_attention_cache
        if is_stored:
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        key, value = self._key_value(x if source is None else source, angles)
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx)

    def _key_value(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """What a token stores, ``[b, g, s, d]`` each."""
        k, v = self.layer.key_value(x, angles)
        return k.transpose(1, 2), v.transpose(1, 2)


class ReplacedLatentAttention(ReplacedAttention):
    """The same of a layer over latents, which are what is cached, and are absorbed as :mod:`.latents`
    says.
    """

    def __init__(self, layer: nn.Module, family: Family, config: Any, index: int):
        super().__init__(layer, family, config, index)
        for name in SIZES:
            setattr(self, name, getattr(layer, name))

    @property
    def kv_b_proj(self) -> nn.Module:
        """The up-projection of keys and values."""
        return self.layer.kv_b_proj

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[b, h, t, n + p]`` and values ``[b, h, t, e]``."""
        k, v = self.layer.expand(latent[:, 0], k_rope[:, 0])
        return k.transpose(1, 2), v.transpose(1, 2)

    def _query(self, x: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        return torch.cat(self.layer.query(x, angles, positions), -1).transpose(1, 2)

    def _key_value(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.layer.latent(x, angles)
        k_rope = latent[..., :0] if k_rope is None else k_rope
        return latent[:, None], k_rope[:, None]

    def _stored(
        self, x: Tensor, angles: Angles | None, cache: Any, source: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        latent, k_rope = super()._stored(x, angles, cache, source)
        grad = torch.is_grad_enabled() and (latent.requires_grad or self.kv_b_proj.weight.requires_grad)
        return self.expand_kv(latent, k_rope) if grad else (k_rope, latent)


class ReplacedRotary(nn.Module):
    """The angles of a step, once for all layers with the same rope; ``ropes`` are by the layers' type."""

    def __init__(self, ropes: Mapping[str, Rope]):
        super().__init__()
        self.ropes: dict[str, Rope] = dict(ropes)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Angles:
        """Of ``position_ids`` ``[b, s]``; ``x`` is not looked at."""
        rope = next(iter(self.ropes.values())) if layer_type is None else self.ropes[layer_type]
        return angles_at(rope, position_ids)


def angles_at(rope: Rope, position_ids: Tensor) -> Angles:
    """Angles at ``position_ids`` ``[b, s]``, of a rope that may depend on how far they go."""
    if not rope.needs_length:
        return rope.angles(position_ids)
    if not isinstance(rope.scaling, LongRoPE):
        return rope.angles(position_ids, length=int(position_ids.max()) + 1)
    original = rope.scaling.original_max_position
    short, long = (rope.angles(position_ids, length=length) for length in (original, original + 1))
    is_long = position_ids.max() >= original  # chosen on the device
    cos, sin = (torch.where(is_long, x, y) for x, y in ((long.cos, short.cos), (long.sin, short.sin)))
    return Angles(cos, sin, rope.interleaved)


def replace_attention(model: nn.Module) -> None:
    """Put layers of attnlib, with the model's weights, where its known families have theirs.

    Raises:
        ValueError: the model has no attention of a known family.
        NotImplementedError: of a known one, something is not known.
    """
    made = [(path, module, _replaced(module, *at)) for path, module, at in attention_of(model)]
    if not made:
        family_of(model.config.get_text_config(), "self")
        raise ValueError(f"model: expected one with attention of a known family, got {type(model).__name__}")
    for path, module, attention in made:
        family = attention.family
        if not family.place:
            put(model, path, attention)
            _keep_names(attention, family, "layer.")
            continue
        put(module, family.place, attention)
        for name, _ in family.weights:
            if not name.startswith(f"{family.place}."):
                put(module, name, nn.Identity())  # which the layer does itself
        _keep_names(module, family, f"{family.place}.layer.")
    put_angles(model, [(x.config, x.layer_idx, x.layer.rope) for _, _, x in made])


def put_angles(model: nn.Module, ropes: Iterable[tuple[Any, int, Rope | None]]) -> None:
    """Have a model make angles by these ropes, each that of a config's layer of this number."""
    found: dict[int, dict[str, Rope]] = {}
    for config, index, rope in ropes:
        if rope is not None:
            found.setdefault(id(config), {})[layer_type(config, index)] = rope
    for path, module in list(model.named_modules()):
        if path.endswith("rotary_emb") and id(getattr(module, "config", None)) in found:
            put(model, path, ReplacedRotary(found[id(module.config)]))


def attention_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, int]]]:
    """The name, the module, and the part and index of each attention that a known family has."""
    for path, module in model.named_modules():
        config = config_of(module)
        for (model_type, part), family in FAMILIES.items() if config is not None else ():
            is_theirs = config.model_type == model_type
            match = re.search(rf"(?:^|\.){family.path}$", path) if is_theirs else None
            if match:
                yield path, module, (part, int(match[1]))


def config_of(module: nn.Module) -> Any:
    """The config by which the module, or what it holds, was made."""
    holders = (module, *module.children())
    return next((x.config for x in holders if hasattr(getattr(x, "config", None), "model_type")), None)


def _replaced(module: nn.Module, part: str, index: int) -> ReplacedAttention:
    config = config_of(module)
    family, weights = family_of(config, part), dict(module.state_dict())
    weights = {name: x for name, x in weights.items() if not name.startswith(family.beside)}
    layer = layer_from(config, index, part, weights, {"device": "meta"})
    learns, theirs = (
        {name: x.requires_grad for name, x in module.named_parameters()},
        theirs_of(family, layer),
    )
    for name, x in layer.named_parameters():
        x.requires_grad_(learns[theirs[name]])
    kind = ReplacedLatentAttention if family.is_latent else ReplacedAttention
    return kind(layer, family, config, index).train(module.training)


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of another one."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _keep_names(owner: nn.Module, family: Family, inner: str) -> None:
    """Let state dicts have transformers' names and shapes, so that what is saved is a folder of the family's
    own.
    """
    owner.register_state_dict_post_hook(partial(rename_saved, family, inner))
    owner.register_load_state_dict_pre_hook(partial(rename_loaded, family, inner))
