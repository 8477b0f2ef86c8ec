"""attnlib layers that a transformers model calls like its own attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, StaticLayer

from ...layers.attending import runner_of
from ...layers.tensor_parallel import share_of
from ...masks.band import Mask
from ...rope.rope import Angles
from .attention import attention_forward, check_arguments, refuse_weights
from .building import shared_as
from .family import Family
from .latents import SIZES


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
        attention_mask = mask if attention_mask is None else attention_mask
        self._check_static(hidden_states, cache, attention_mask)
        kwargs |= self._own_choice(hidden_states, angles, cache, attention_mask, kwargs)
        if self.layer.own_keys:
            key, value = self._stored(hidden_states, angles, cache, key_value_states)
        else:
            key, value = self._shared(shared)
        modes = getattr(self.config, "kv_sharing_modes", None)
        if shared is not None and (modes is None or modes[self.layer_idx] == "store"):
            shared[shared_as(self.config, self.layer_idx)] = key, value
        key, value = self._expanded(key, value)
        query = self._query(hidden_states, angles, positions)
        out = self._attend(query, key, value, attention_mask, kwargs)
        if self.layer.gate is not None:
            out = self.layer.gate.apply(out, self.layer.g_proj(hidden_states))
        out = self.layer.o_proj(out.flatten(-2))
        if self.family.residual_dropout is not None:
            p = getattr(self.config, self.family.residual_dropout)
            out = nn.functional.dropout(out, p, training=self.training)
        return (out, None) if self.family.returns == 2 else (out, position_bias, None)

    def _check_static(self, x: Tensor, cache: Any, mask: Tensor | None) -> None:
        """Raise NotImplementedError if only a mask, which is missing, could tell the unused keys of a cache.

        transformers leaves it out for "sdpa", whose causal flag counts queries from the first key on.
        """
        if mask is not None or cache is None or x.shape[1] == 1 or torch.compiler.is_compiling():
            return
        layers = getattr(cache, "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if not isinstance(layer, StaticLayer):
            return
        tokens = int(layer.get_seq_length()) + x.shape[1]
        if tokens < layer.max_cache_len:
            raise NotImplementedError(
                f"attention_mask: expected one with a static cache of {layer.max_cache_len} tokens, of which "
                f'{tokens} are used, got None; select attn_implementation="attnlib", which makes it'
            )

    def _own_choice(
        self, x: Tensor, angles: Angles | None, cache: Any, mask: Tensor | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Return further arguments of :meth:`_attend`, from those of the layer."""
        return {}

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        """Return the output ``[b, s, h, e]`` of attention, from the tensors that it has in transformers."""
        share = share_of(self.layer.query_projection, self.layer.num_heads, query.shape[1])
        out, _ = attention_forward(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.layer.dropout_p if self.training else 0.0,
            scaling=self.layer.scale,
            softcap=getattr(self.layer, "softcap", None),
            s_aux=getattr(self.layer, "sinks", None),
            backend=runner_of(self.layer, share),
            **given | {"is_causal": self.is_causal, "sliding_window": self.sliding_window},
        )
        return out

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
        kind = shared_as(self.config, self.layer_idx)
        if not shared or kind not in shared:
            raise ValueError(
                f"shared_kv_states: layer {self.layer_idx} reads the keys of an earlier {kind!r} layer, and "
                "the model has passed none"
            )
        return shared[kind]

    def _expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values for attention, given the tensors that the layer stores."""
        return key, value

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

    def _expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = key, value
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
