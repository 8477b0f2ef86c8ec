"""Replace a model's attention with attnlib layers that keep transformers' call signature and weight names."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...rope.rope import Angles, Rope
from ...rope.scaling import LongRoPEScaling
from .building import family_of, layer_from, layer_type
from .families import FAMILIES
from .family import Family
from .means import ReplacedMeansAttention
from .replaced_layers import ReplacedAttention, ReplacedLatentAttention, ReplacedPackedAttention
from .selecting import ReplacedSelectingAttention, ReplacedSelectingGroupedAttention
from .weights import rename_loaded, rename_saved, theirs_of

ROTARIES = ("rotary_emb", "pos_emb")  # names of the module that computes a model's rope angles


class ReplacedRotary(nn.Module):
    """A module that computes rope angles once per step; ``ropes`` has the rope of each layer type.

    ``alpha`` is the parameter of a rope with learnt factors, :class:`.LearntRope`.
    """

    def __init__(self, ropes: Mapping[str, Rope], alpha: nn.Parameter | None = None):
        super().__init__()
        self.ropes: dict[str, Rope] = dict(ropes)
        self.register_parameter("alpha", alpha)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rope angles at ``position_ids`` ``[b, s]``; ``x`` is ignored.

        This is a plain tuple of fp32 ``[b, s, p / 2]``, since Gemma 4 slices it.
        """
        rope = next(iter(self.ropes.values())) if layer_type is None else self.ropes[layer_type]
        angles = angles_at(rope, position_ids, self.alpha)
        return angles.cos, angles.sin


def angles_at(rope: Rope, position_ids: Tensor, alpha: Tensor | None = None) -> Angles:
    """Return rope angles at ``position_ids`` ``[b, s]``; the rope may depend on the sequence length.

    The positions on several axes are ``[axes, b, s]``, and those of text may have one axis. ``alpha`` is the
    parameter of a rope with learnt factors.
    """
    make = rope.angles if alpha is None else partial(rope.learnt_angles, alpha=alpha)
    if rope.axes is not None:
        position_ids = position_ids.expand(len(rope.axes.sections), -1, -1)
    if not rope.needs_length:
        return make(position_ids)
    if not isinstance(rope.scaling, LongRoPEScaling):
        return make(position_ids, length=int(position_ids.max()) + 1)
    original = rope.scaling.original_max_position
    short, long = (make(position_ids, length=length) for length in (original, original + 1))
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
            put(model, path, ReplacedRotary(found[id(module.config)], getattr(module, "alpha", None)))


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
    if family.select is not None:
        kind = ReplacedSelectingAttention if family.is_latent else ReplacedSelectingGroupedAttention
        kind = ReplacedMeansAttention if layer.select is not None and layer.select.norm_after_pool else kind
    return kind(layer, family, config, index).train(module.training)


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the submodule at a dotted path in a model."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _keep_names(owner: nn.Module, family: Family, inner: str) -> None:
    """Make state dicts use transformers' names and shapes, so that other libraries can load saved models."""
    owner.register_state_dict_post_hook(partial(rename_saved, family, inner))
    owner.register_load_state_dict_pre_hook(partial(rename_loaded, family, inner))
