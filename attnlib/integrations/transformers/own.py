"""Models in attnlib's own checkpoint form, whose config.json describes each attention layer.

The models are transformers classes with attnlib's attention layers. Each attention module holds its layer as
``layer``, and weights have that layer's names. transformers builds the rest of the model and loads the
weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...checkpoint_files.folder import CONFIG
from ...indexing import Indexer
from ...layers import GroupedQueryAttention, MultiHeadLatentAttention
from ...layers.choices import check_select
from ...layers.normed_heads import NormedKeys, NormedQueries
from ...models.own_form import (
    BranchForm,
    GroupedForm,
    LatentForm,
    LayerForm,
    base_of,
    forms_from,
    layers_of,
    own_config,
    plain_form,
)
from ...rope.rope import Rope
from ...rope.selected import select
from .building import family_of, layer_from, rope_of
from .family import Family
from .norms import HeadRMSNorm
from .own_selecting import ChoosesKeys
from .replacing import (
    ReplacedAttention,
    ReplacedLatentAttention,
    angles_at,
    attention_of,
    config_of,
    put,
    put_angles,
)

FORMS = "attnlib_layers"  # this config field, in memory only, describes the attention layers


def config_from(fields: dict[str, Any]) -> PreTrainedConfig:
    """Convert a config.json in attnlib's own form to a transformers config with a field ``attnlib_layers``.

    Raises:
        ValueError: the file does not have attnlib's form, or transformers does not know the model.
    """
    base, layers = base_of(fields), layers_of(fields)
    config = AutoConfig.for_model(str(base.pop("model_type", None)), **base)
    text = config.get_text_config()
    if len(layers) != text.num_hidden_layers:
        raise ValueError(f"layers: expected {text.num_hidden_layers}, as base says, got {len(layers)}")
    setattr(text, FORMS, [plain_form(layer) for layer in layers])
    return config


def knows_layers(config: PreTrainedConfig) -> bool:
    """True if a config describes attention layers of attnlib."""
    return hasattr(config.get_text_config(), FORMS)


def own_class(kind: type[PreTrainedModel], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return a subclass of a transformers class with the attention layers that ``config`` describes."""
    layers = forms_from(getattr(config.get_text_config(), FORMS))

    class Own(kind):
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            put_layers(self, layers)

        def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
            """Save like any transformers model, but write config.json in attnlib's own form."""
            super().save_pretrained(save_directory, **kwargs)
            path = Path(save_directory, CONFIG)
            base = json.loads(path.read_text("utf-8"))
            for part in (base, base.get("text_config")):
                if part is not None:
                    part.pop(FORMS, None)
            path.write_text(json.dumps(own_config(base, layers), indent=2) + "\n", "utf-8")

    Own.__name__ = Own.__qualname__ = kind.__name__
    Own.__module__ = kind.__module__
    return Own


def put_layers(model: nn.Module, layers: Sequence[LayerForm]) -> None:
    """Replace a model's attention with the attnlib layers that ``layers`` describes; weights are not set.

    Raises:
        ValueError: the layer count or a size does not fit the model.
        NotImplementedError: the family or a field of the config is unknown, or an MLA layer lacks a feature
            that the config needs.
    """
    made = []
    for path, module, (part, index) in list(attention_of(model)):
        config = config_of(module)
        family = family_of(config, part)
        if family.is_packed:  # a vision encoder, which is not converted
            continue
        if part != "self" or family.place or family.is_latent:
            raise NotImplementedError(
                f"base: expected a decoder with heads of its own, got {config.model_type}"
            )
        attention = _attention(family, config, index, layers[index])
        put(model, path, attention)
        made.append(attention)
    if sorted(attention.layer_idx for attention in made) != list(range(len(layers))):
        raise ValueError(
            f"layers: expected {len(made)}, of which {type(model).__name__} knows, got {len(layers)}"
        )
    put_angles(model, [(x.config, x.layer_idx, rope_of(x.family, x.config, x.layer_idx)) for x in made])


def latent_from(grouped: GroupedQueryAttention, form: LatentForm) -> MultiHeadLatentAttention:
    """Make an MLA layer that can replace the attention layer ``grouped``; its weights are not set.

    Raises:
        ValueError: ``form`` selects rope pairs that ``grouped`` does not have.
        NotImplementedError: ``grouped`` uses a feature that MLA layers lack.
    """
    norms = () if form.qk_norm and _has_plain_norms(grouped) else ("q_norm", "k_norm")
    for name in (*norms, "sinks", "softcap", "alibi_slopes", "gate"):
        if getattr(grouped, name) is not None:
            raise NotImplementedError(
                f"layers: expected grouped layers, because latent layers do not support {name}, got latents"
            )
    rope = _selected(grouped.rope, form.rope_pairs)
    most = max(map(form.rope_pairs.count, form.rope_pairs), default=0)
    if most > grouped.num_kv_heads:
        heads = grouped.num_kv_heads
        raise ValueError(
            f"rope_pairs: expected each pair at most {heads} times, as there are KV heads, got one {most}"
        )
    layer = MultiHeadLatentAttention(
        grouped.hidden_size,
        grouped.num_heads,
        mask=grouped.mask,
        q_lora_rank=form.q_lora_rank,
        kv_lora_rank=form.kv_lora_rank,
        qk_nope_head_dim=form.qk_nope_head_dim,
        qk_rope_head_dim=form.qk_rope_head_dim,
        v_head_dim=form.v_head_dim,
        bias=form.bias,
        rope=rope,
        temperature=grouped.temperature,
        norm_eps=form.norm_eps,
        scale=grouped.scale,
        select=_indexer(form.select, grouped.rope),
        dropout_p=grouped.dropout_p,
    )
    if form.qk_norm:
        if norms:
            raise ValueError("qk_norm: expected false, as base has no norms of q and k, got true")
        _read_norms(layer, grouped, form)
    if form.query_bias:
        plain = getattr(layer, form.query_projection)
        setattr(layer, form.query_projection, nn.Linear(plain.in_features, plain.out_features))
    return layer


def _selected(rope: Rope | None, pairs: tuple[int, ...]) -> Rope | None:
    """Return a rope of these pairs of ``rope``; None without pairs.

    Raises:
        ValueError: the rope does not have such pairs.
    """
    count = 0 if rope is None else rope.dim // 2
    if any(pair >= count for pair in pairs):
        raise ValueError(
            f"rope_pairs: expected numbers below {count}, of which the rope has pairs, got {pairs}"
        )
    return select(rope, pairs) if pairs else None


def _indexer(form: BranchForm | None, rope: Rope | None) -> Indexer | None:
    """Return the index branch that ``form`` describes, in a layer of ``base`` with this rope.

    A branch with all pairs has the layer's rope, and reuses its angles.
    """
    if form is None:
        return None
    fields = asdict(form)
    pairs = fields.pop("rope_pairs")
    if rope is None or pairs != tuple(range(rope.dim // 2)):
        rope = _selected(rope, pairs)
    blocks = {"pool": "max", "local": 1} if form.block_size > 1 else {}
    return Indexer(**fields, **blocks, rope=rope)


def branch_form(config: Any, index: int, *, head_dim: int | None, **sizes: int) -> BranchForm:
    """Return an index branch for a layer of a model; ``head_dim`` defaults to that of the layer.

    It rotates as many pairs as the layer, or if it has fewer channels, pairs at equal distances.

    Raises:
        ValueError: the layer cannot have an index branch.
    """
    layer = layer_from(config, index, "self", None, {"device": "meta"})
    head_dim = layer.head_dim if head_dim is None else head_dim
    pairs = 0 if layer.rope is None else layer.rope.dim // 2
    count = min(pairs, head_dim // 2)
    if 0 < count < pairs and layer.rope.needs_length:
        raise ValueError(
            f"head_dim: expected at least {2 * pairs}, since {type(layer.rope.scaling).__name__} needs the "
            f"length of the sequence, got {head_dim}"
        )
    chosen = tuple(c * pairs // count for c in range(count))
    form = BranchForm(head_dim=head_dim, rope_pairs=chosen, **sizes)
    check_select(layer, _indexer(form, layer.rope), kv_heads=layer.num_kv_heads, q_lora_rank=None)
    return form


def new_branch(config: Any, index: int, form: LayerForm) -> dict[str, torch.Tensor]:
    """Return new weights of a layer's index branch by their names in the layer; each call gives the same."""
    with torch.device("meta"):
        branch = _attention(family_of(config, "self"), config, index, form).layer.indexer
    branch = branch.to_empty(device="cpu")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(index)
        branch.reset_parameters()
    return {f"indexer.{name}": x for name, x in branch.state_dict().items()}


def _has_plain_norms(grouped: GroupedQueryAttention) -> bool:
    """True if q and k have an RMS norm of each head before rope, with one weight for all heads."""
    return type(grouped.q_norm) is HeadRMSNorm and not grouped.norm_after_rope


def _read_norms(layer: MultiHeadLatentAttention, grouped: GroupedQueryAttention, form: LatentForm) -> None:
    """Replace the projections of ``layer`` by ones that normalize heads as ``grouped`` does."""
    if form.q_lora_rank is not None:
        raise NotImplementedError("q_lora_rank: expected null, as queries are normalized by head, got a rank")

    def parts(name: str) -> tuple[nn.Linear, nn.RMSNorm]:
        old, norm = getattr(grouped, f"{name}_proj"), getattr(grouped, f"{name}_norm")
        linear = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        return linear, nn.RMSNorm(norm.normalized_shape, eps=norm.eps)

    layer.q_proj = NormedQueries(*parts("q"), form.qk_nope_head_dim + form.qk_rope_head_dim)
    layer.kv_a_proj_with_mqa = NormedKeys(
        *parts("k"), form.kv_lora_rank + form.qk_rope_head_dim, bias=form.bias
    )


class TurnsAlone(ReplacedAttention):
    """A replaced attention layer that computes its own rope angles and ignores the model's.

    Raises:
        NotImplementedError: the rope has several axes, as models tell attention the positions on one only.
    """

    def __init__(self, layer: nn.Module, family: Family, config: Any, index: int):
        super().__init__(layer, family, config, index)
        if layer.rope is not None and layer.rope.axes is not None:
            raise NotImplementedError(
                f"{config.model_type}: expected a rope with one axis in a layer that computes its own "
                f"angles, got {len(layer.rope.axes.sections)}"
            )

    def _angles(self, theirs: Any, position_ids: torch.Tensor | None) -> Any:
        if self.layer.rope is None:
            return None
        if position_ids is None:
            raise NotImplementedError(f"{self.config.model_type}: does not tell its attention position_ids")
        return angles_at(self.layer.rope, position_ids)


class OwnLatentAttention(TurnsAlone, ReplacedLatentAttention):
    """A replaced MLA layer with a rope of its own, because each layer selects which pairs it rotates."""


class OwnChoosingLatentAttention(ChoosesKeys, OwnLatentAttention):
    """The same with an index branch."""


def attention_alone(config: Any, index: int, form: LayerForm, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Make one attention layer from its description and weights, to use in an unconverted model.

    The other layers of that model are not changed.
    """
    family = family_of(config, "self")
    with torch.device("meta"):
        attention = _attention(family, config, index, form)
        if isinstance(form, GroupedForm):
            attention = TurnsAlone(attention.layer, family, config, index)
    attention.layer.load_state_dict(state, assign=True)
    return attention.eval()


def _attention(family: Family, config: Any, index: int, form: LayerForm) -> ReplacedAttention:
    if isinstance(form, GroupedForm):
        select = _indexer(form.select, rope_of(family, config, index))
        options = {"kv_heads": form.num_key_value_heads}
        layer = layer_from(config, index, "self", None, {"select": select}, **options)
        kind = ReplacedAttention if select is None else ChoosesKeys
    else:
        layer = latent_from(layer_from(config, index, "self", None, {"device": "meta"}), form)
        kind = OwnLatentAttention if form.select is None else OwnChoosingLatentAttention
    return kind(layer, family, config, index)
