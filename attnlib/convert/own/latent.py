"""Convert layers to latent attention (MLA), for checkpoints in attnlib's own form.

Unlike DeepSeek's config.json, attnlib's own form supports windows, biases and any rope.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from ...models.own_form import LatentForm, biases_in
from ..calibration import fitting
from ..checkpoint.layer import ConvertedLayer, LayerShape
from ..checkpoint.model import has_key_norms
from ..checkpoint.source_rope import rope_of
from ..heads.converter import heads_of
from ..latent.attended import Attended, attended, usual_scale
from ..latent.cost import Cost
from ..latent.embedding import Latent
from ..latent.folding import even_queries
from ..latent.layers import (
    check_latent_heads,
    identity_eps,
    latent_state,
    rounded,
    whole_latent,
    with_low_rank_queries,
)
from ..latent.normed import normed, on_inputs
from ..latent.queries import QueryCost, check_query_rank
from ..latent.truncation import Spectrum
from ..stock import read_config
from ..weights import Heads
from .kind import Kind, Measured

ROPE_DIM = 64  # default number of rotary channels, if the source has at least as many
# Under a budget, numbers of rotary channels are tried from LEAST to MOST of a layer's equal share of the
# cache. The best number varies by model and budget, but its neighbours are nearly as good, so few are tried.
LEAST, MOST = 1 / 8, 5 / 6
STEP = 16  # ranks are chosen in steps of this, or in smaller steps for small latents


class _Decomposed(NamedTuple):
    """A layer decomposed once, so that it can be truncated to any rank.

    ``whole`` is the latent of full rank, and ``seen`` describes the calibration inputs. ``cost`` weights
    errors of the latent, and ``queries`` weights errors of the queries. ``rotation_loss`` is the relative
    squared error that rotating fewer channels causes in the scores.
    """

    whole: Latent
    seen: Attended
    cost: Cost
    queries: QueryCost
    rotation_loss: float


class LatentKind(Kind):
    """Latent layers (MLA): a layer's size is the rank of its latent.

    ``options`` are ``rope_dim``, the number of rotary channels (None for the default), ``q_rank``, the rank
    of the queries (None for queries without a latent), and ``reach``, the maximum distance between query and
    key for which errors of scores count.
    """

    def alternatives(self, total: int) -> list[Kind]:
        """Return a kind for each number of rotary channels to try, the default first."""
        layers = self.model.layers
        widest = min(filter(None, map(self._rotary, layers)), default=0)
        if self.options["rope_dim"] is not None or not widest:
            return [self]
        share = total / len(layers) / self.model.dtype.itemsize
        ladder = [n * 2**power for power in range(1, 16) for n in (2, 3)]
        tried = [n for n in ladder if n <= widest and LEAST * share <= n <= MOST * share]
        numbers = dict.fromkeys((min(ROPE_DIM, widest), *tried))
        return [replace(self, options={**self.options, "rope_dim": n}) for n in numbers]

    def sizes(self, index: int) -> list[int]:
        whole = self._whole(index)
        step = min(STEP, 2 ** int(math.log2(max(1, whole // STEP))))
        return [*range(step, whole, step), whole]

    def form(self, index: int, size: int) -> LatentForm:
        whole, rotary, rope_dim = self._whole(index), self._rotary(index), self._rope_dim(index)
        if rotary and (not 2 <= rope_dim <= rotary or rope_dim % 2):
            raise ValueError(f"rope_dim: expected an even number from 2 to {rotary}, got {rope_dim}")
        if not 1 <= size <= whole:
            raise ValueError(f"rank: expected 1 to {whole}, the rank of the whole latent, got {size}")
        shape = self.model.shape
        pairs = max(1, rotary // shape.kv_heads // 2)
        check_query_rank(
            self.options["q_rank"], heads=shape.heads, head_dim=shape.head_dim, width=shape.width
        )
        return LatentForm(
            kv_lora_rank=size,
            qk_nope_head_dim=self._unrotated(index),
            qk_rope_head_dim=rope_dim,
            v_head_dim=shape.head_dim,
            rope_pairs=tuple(c % pairs for c in range(rope_dim // 2)),  # placeholders, replaced in _layer
            norm_eps=identity_eps(self.model.dtype),
            q_lora_rank=self.options["q_rank"],
            qk_norm=has_key_norms(self.model),
        )

    def measured(self, weights: Mapping[str, Tensor], shape: LayerShape, sizes: Sequence[int]) -> Measured:
        layer = self._decomposed(weights, shape)
        spectrum = Spectrum.of(layer.whole, layer.seen, layer.cost)
        squares = spectrum.lost.tolist()
        layers = {size: self._layer(layer, spectrum, weights, shape, size) for size in sizes}
        return Measured({size: squares[size] for size in self.sizes(shape.index)}, layers)

    def made(self, weights: Mapping[str, Tensor], shape: LayerShape, size: int) -> ConvertedLayer:
        layer = self._decomposed(weights, shape)
        is_whole = size == len(layer.whole.down)
        spectrum = None if is_whole else Spectrum.of(layer.whole, layer.seen, layer.cost)
        return self._layer(layer, spectrum, weights, shape, size)

    def _layer(
        self,
        layer: _Decomposed,
        spectrum: Spectrum | None,
        weights: Mapping[str, Tensor],
        shape: LayerShape,
        size: int,
    ) -> ConvertedLayer:
        """Convert a layer to a latent of rank ``size``; ``spectrum`` may be None for the full rank."""
        latent = layer.whole if size == len(layer.whole.down) else spectrum.cut(layer.whole, size)
        keys, values = layer.cost.shares(layer.whole, latent, layer.seen)
        squares = {"key_error": keys, "value_error": values, "rope_error": layer.rotation_loss}
        errors = {name: share**0.5 for name, share in squares.items()}
        if self.options["q_rank"] is not None:
            latent, errors["query_error"] = with_low_rank_queries(
                latent, self.options["q_rank"], layer.queries
            )
        new = latent_state(latent, weights)
        if "k_norm.weight" in weights:
            on_device = {name: value.to(self.device) for name, value in weights.items()}
            new = on_inputs(new, self._heads(on_device, shape), on_device)
        stored, rounding = rounded(new, weights["q_proj.weight"].dtype)
        state = {name: value.cpu() for name, value in stored.items()}
        form = replace(
            self.form(shape.index, size),
            rope_pairs=() if latent.rope is None else latent.rope.pairs,
            **biases_in(state),
        )
        return ConvertedLayer(state, errors=errors | {"rounding": rounding}, form=form)

    def _decomposed(self, weights: Mapping[str, Tensor], shape: LayerShape) -> _Decomposed:
        on_device = {name: value.to(self.device) for name, value in weights.items()}
        heads = self._heads(on_device, shape)
        calibration = None if self.calibrations is None else self.calibrations(shape.index)
        calibration = fitting(calibration, shape.width, heads.k.device)
        if heads.gains is not None:
            eps = read_config(self.model.checkpoint).get_text_config().rms_norm_eps
            heads, calibration = normed(heads, calibration, eps=eps)
        check_latent_heads(heads)
        scale, reach = usual_scale(heads.rope, shape.head_dim), self.options["reach"]
        seen = attended(heads, calibration, scale=scale)
        # If all rotary channels stay, no pairs are mixed, and even_queries would only add rounding errors.
        if self._rope_dim(shape.index) < self._rotary(shape.index):
            heads = even_queries(heads, calibration)
        whole, rotation_loss = whole_latent(
            heads, self._rope_dim(shape.index) or None, calibration, reach=reach
        )
        whole = _padded(whole, self._unrotated(shape.index))
        cost = Cost.of(whole, heads, calibration, seen, reach=reach)
        return _Decomposed(
            whole, seen, cost, QueryCost.of(heads, calibration, seen, reach=reach), rotation_loss
        )

    def _heads(self, weights: Mapping[str, Tensor], shape: LayerShape) -> Heads:
        return heads_of(weights, shape, rope_of(self.model.config, shape.index))

    def _rotary(self, index: int) -> int:
        """Return the source's number of rotary channels, summed over its KV heads."""
        rope = rope_of(self.model.config, index)
        return 0 if rope is None else rope.dim * self.model.shape.kv_heads

    def _rope_dim(self, index: int) -> int:
        """Return the number of rotary channels after conversion; 0 for a layer without rope."""
        rotary, asked = self._rotary(index), self.options["rope_dim"]
        return min(ROPE_DIM, rotary) if asked is None or not rotary else asked

    def _whole(self, index: int) -> int:
        """Return the largest rank of a layer's latent, at which nothing is truncated."""
        return 2 * self.model.shape.kv_heads * self.model.shape.head_dim - self._rope_dim(index)

    def _unrotated(self, index: int) -> int:
        """Return the number of unrotated channels of a query.

        If some rotary pairs are dropped, this is the size of the whole head.
        """
        shape, rotary = self.model.shape, self._rotary(index)
        if self._rope_dim(index) < rotary:
            return shape.head_dim
        return max(1, shape.head_dim - rotary // shape.kv_heads)


def _padded(latent: Latent, width: int) -> Latent:
    """Add zero channels to queries and keys, so that each head has ``width`` unrotated channels."""
    more = width - latent.to_nope.shape[1]
    return replace(
        latent, to_nope=pad(latent.to_nope, (0, 0, 0, more)), k_up=pad(latent.k_up, (0, 0, 0, more))
    )
