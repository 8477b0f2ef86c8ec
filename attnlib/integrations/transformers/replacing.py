"""Replace a model's attention with attnlib layers that keep transformers' call signature and weight names."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from ...layers.attending import runner_of
from ...layers.tensor_parallel import share_of
from ...masks.band import Mask
from ...rope.rope import Angles, Rope
from ...rope.scaling import LongRoPEScaling
from .attention import attention_forward, check_arguments, refuse_weights
from .building import family_of, layer_from, layer_type
from .families import FAMILIES
from .family import Family
from .latents import SIZES
from .weights import rename_loaded, rename_saved, theirs_of

ROTARIES = ("rotary_emb", "pos_emb")  # names of the module that computes a model's rope angles


class ReplacedAttention(nn.Module):
    """An attnlib ``layer`` that a transformers model calls like its own attention."""

    def __init__(self, layer: nn.Module, family: Family, config: Any, index: int):
        super().__init__()
        self.layer = layer
        self.family = family
        self.config: Any = config
        self.layer_idx: int = index
        self.is_causal: bool = family.is_causal
        self.sliding_window: int | None = layer.mask.kept[0] if isinstance(layer.mask, Mask) else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        position_embeddings: Angles | tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return the output for ``hidden_states`` ``[b, s, m]`` and other values that the model expects.

        T5 calls its mask ``mask``, and passes a position bias from layer to layer. It is returned unused,
        since it is 0 in cross-attention. The argument ``cache`` was called ``past_key_values`` before
        transformers 5.24; GPT-NeoX calls it ``layer_past``.
        """
        refuse_weights(kwargs)
        older = [kwargs.pop(name, None) for name in ("past_key_values", "layer_past")]
        cache = next((x for x in (cache, *older) if x is not None), None)
        angles = self._angles(position_embeddings, kwargs.get("position_ids"))
        positions = self._positions(hidden_states, kwargs.get("position_ids"), cache)
        shared = kwargs.pop("shared_kv_states", None)
        if self.layer.own_keys:
            key, value = self._stored(hidden_states, angles, cache, key_value_states)
        else:
            key, value = self._shared(shared)
        if shared is not None:
            shared[layer_type(self.config, self.layer_idx)] = key, value
        query = self._query(hidden_states, angles, positions)
        share = share_of(self.layer.query_projection, self.layer.num_heads, query.shape[1])
        out, _ = attention_forward(
            self,
            query,
            key,
            value,
            mask if attention_mask is None else attention_mask,
            dropout=self.layer.dropout_p if self.training else 0.0,
            scaling=self.layer.scale,
            softcap=getattr(self.layer, "softcap", None),
            s_aux=getattr(self.layer, "sinks", None),
            backend=runner_of(self.layer, share),
            **kwargs | {"is_causal": self.is_causal, "sliding_window": self.sliding_window},
        )
        if self.layer.gate is not None:
            out = self.layer.gate.apply(out, self.layer.g_proj(hidden_states))
        out = self.layer.o_proj(out.flatten(-2))
        if self.family.residual_dropout is not None:
            p = getattr(self.config, self.family.residual_dropout)
            out = nn.functional.dropout(out, p, training=self.training)
        return (out, None) if self.family.returns == 2 else (out, position_bias, None)

    def _angles(
        self, theirs: Angles | tuple[Tensor, Tensor] | None, position_ids: Tensor | None
    ) -> Angles | None:
        """Return the model's rope angles, which all layers share, or None if this layer has no rope."""
        if self.layer.rope is None or isinstance(theirs, Angles | None):
            return None if self.layer.rope is None else theirs
        return Angles(*theirs, self.layer.rope.interleaved)

    def _positions(self, x: Tensor, position_ids: Tensor | None, cache: Any) -> Tensor | None:
        """Return the positions for the query temperature: position ids, or indices that count padding."""
        if self.layer.temperature is None or not self.family.counts_padding:
            return position_ids
        stored = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        return torch.arange(x.shape[1], device=x.device) + stored

    def _query(self, x: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        """Project hidden states to rotated queries ``[b, h, s, d]``."""
        return self.layer.query(x, angles, positions).transpose(1, 2)

    def _stored(
        self, x: Tensor, angles: Angles | None, cache: Any, source: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens ``x``, if there is a cache; return those of all tokens.

        Cross-attention projects ``source`` instead of ``x``, and stores the result only once.
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

    def _shared(self, shared: Mapping[str, tuple[Tensor, Tensor]] | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the last layer of this type with keys of its own has shared.

        Raises:
            ValueError: the model shares none, as it calls this layer alone.
        """
        kind = layer_type(self.config, self.layer_idx)
        if not shared or kind not in shared:
            raise ValueError(
                f"shared_kv_states: layer {self.layer_idx} reads the keys of an earlier {kind!r} layer, and "
                "the model has passed none"
            )
        return shared[kind]

    def _key_value(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """Return the two tensors ``[b, g, s, d]`` to store in the cache for the new tokens."""
        k, v = self.layer.key_value(x, angles)
        return k.transpose(1, 2), v.transpose(1, 2)


class ReplacedLatentAttention(ReplacedAttention):
    """A replaced MLA layer: the cache holds latents, and attention may run on them as in :mod:`.latents`."""

    def __init__(self, layer: nn.Module, family: Family, config: Any, index: int):
        super().__init__(layer, family, config, index)
        for name in SIZES:
            setattr(self, name, getattr(layer, name))

    @property
    def kv_b_proj(self) -> nn.Module:
        """The up-projection from latents to keys and values."""
        return self.layer.kv_b_proj

    def expand_kv(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents to keys ``[b, h, t, n + p]`` and values ``[b, h, t, e]``."""
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


class ReplacedPackedAttention(ReplacedAttention):
    """A replaced layer of a vision encoder, whose tokens are packed."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output ``[t, m]`` for ``hidden_states`` ``[t, m]`` of the images at ``cu_seqlens``.

        ``position_embeddings`` are the model's cosines and sines ``[t, d]``, whose halves are equal.
        """
        check_arguments(kwargs)
        refuse_weights(kwargs)
        cos, sin = (x.chunk(2, -1)[0].float().contiguous() for x in position_embeddings)
        angles = Angles(cos, sin, self.layer.rope.interleaved)
        return self.layer(hidden_states, angles=angles, cu_seqlens=cu_seqlens.int())


class ReplacedRotary(nn.Module):
    """A module that computes rope angles once per step; ``ropes`` has the rope of each layer type."""

    def __init__(self, ropes: Mapping[str, Rope]):
        super().__init__()
        self.ropes: dict[str, Rope] = dict(ropes)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rope angles at ``position_ids`` ``[b, s]``; ``x`` is ignored.

        This is a plain tuple of fp32 ``[b, s, p / 2]``, since Gemma 4 slices it.
        """
        rope = next(iter(self.ropes.values())) if layer_type is None else self.ropes[layer_type]
        angles = angles_at(rope, position_ids)
        return angles.cos, angles.sin


def angles_at(rope: Rope, position_ids: Tensor) -> Angles:
    """Return rope angles at ``position_ids`` ``[b, s]``; the rope may depend on the sequence length.

    The positions on several axes are ``[axes, b, s]``, and those of text may have one axis.
    """
    if rope.axes is not None:
        position_ids = position_ids.expand(len(rope.axes.sections), -1, -1)
    if not rope.needs_length:
        return rope.angles(position_ids)
    if not isinstance(rope.scaling, LongRoPEScaling):
        return rope.angles(position_ids, length=int(position_ids.max()) + 1)
    original = rope.scaling.original_max_position
    short, long = (rope.angles(position_ids, length=length) for length in (original, original + 1))
    is_long = position_ids.max() >= original  # a tensor, since reading it would wait for the GPU
    cos, sin = (torch.where(is_long, x, y) for x, y in ((long.cos, short.cos), (long.sin, short.sin)))
    return Angles(cos, sin, rope.interleaved)


def replace_attention(model: nn.Module) -> None:
    """Replace the attention of known families in a model with attnlib layers that have the same weights.

    Raises:
        ValueError: the model has no attention of a known family.
        NotImplementedError: the family is known, but a value in the config is not supported.
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
                put(module, name, nn.Identity())  # the attnlib layer does the work of this module
        _keep_names(module, family, f"{family.place}.layer.")
    put_angles(model, [(x.config, x.layer_idx, x.layer.rope) for _, _, x in made])


def put_angles(model: nn.Module, ropes: Iterable[tuple[Any, int, Rope | None]]) -> None:
    """Make a model compute its rope angles with attnlib; ``ropes`` lists (config, layer number, rope)."""
    found: dict[int, dict[str, Rope]] = {}
    for config, index, rope in ropes:
        if rope is not None:
            found.setdefault(id(config), {})[layer_type(config, index)] = rope
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] in ROTARIES and id(getattr(module, "config", None)) in found:
            put(model, path, ReplacedRotary(found[id(module.config)]))


def attention_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, int]]]:
    """Yield path, module and (part, layer number) of each attention module of a known family.

    The part is "self", "cross" or "encoder", as in the keys of ``FAMILIES``.
    """
    for path, module in model.named_modules():
        config = config_of(module)
        for (model_type, part), family in FAMILIES.items() if config is not None else ():
            is_theirs = config.model_type == model_type
            match = re.search(rf"(?:^|\.){family.path}$", path) if is_theirs else None
            if match and not (family.is_mixed and layer_type(config, int(match[1])) != "full_attention"):
                yield path, module, (part, int(match[1]))


def config_of(module: nn.Module) -> Any:
    """Return the config of a module or of one of its children, or None."""
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
    kind = ReplacedPackedAttention if family.is_packed else ReplacedAttention
    kind = ReplacedLatentAttention if family.is_latent else kind
    return kind(layer, family, config, index).train(module.training)


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the submodule at a dotted path in a model."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _keep_names(owner: nn.Module, family: Family, inner: str) -> None:
    """Make state dicts use transformers' names and shapes, so that other libraries can load saved models."""
    owner.register_state_dict_post_hook(partial(rename_saved, family, inner))
    owner.register_load_state_dict_pre_hook(partial(rename_loaded, family, inner))
