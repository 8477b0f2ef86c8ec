"""attnlib's own form of config.json, for decoders whose attention layers differ in type or size.

``model_type`` is "attnlib", so that no other loader mistakes the folder for the original model. ``layers``
has one entry per attention layer. ``base`` is the source model's config, which describes everything else.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

KIND, VERSION = "attnlib", 1
MAX_SIZE = 2**24  # more heads, channels or ranks than this are a mistake or an attack
INNER = "layer."  # prefix of stored weight names, followed by the name in an attnlib layer


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchForm:
    """An index branch, described by the field names of :class:`attnlib.Indexer`.

    Rotary pair c uses the frequency of pair ``rope_pairs[c]`` of the rope in ``base``; without pairs, the
    branch has no rope. Blocks of several keys have the largest score of their keys (``pool="max"``), and the
    block of the query itself is always chosen (``local=1``).
    """

    heads: int
    head_dim: int
    top: int
    rope_pairs: tuple[int, ...]
    block_size: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self, least=1)
        _check_pairs(self)
        if 2 * len(self.rope_pairs) > self.head_dim:
            raise ValueError(
                f"rope_pairs: expected at most {self.head_dim // 2} pairs of head_dim={self.head_dim}, got "
                f"{len(self.rope_pairs)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedForm:
    """A layer that differs from ``base`` only in its KV-head count, and by an index branch if it has one."""

    num_key_value_heads: int
    select: BranchForm | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """A layer with latent attention (MLA), described by DeepSeek's field names.

    ``q_lora_rank`` is null if queries have no latent. Rotary pair c uses the frequency of pair
    ``rope_pairs[c]`` of the rope in ``base``. ``bias`` adds biases to the projections that may have one in
    DeepSeek's models, and ``query_bias`` to the projection that outputs the query heads. ``norm_eps`` is the
    epsilon of the latent norms. With ``qk_norm``, queries, latents and rotary keys are linear functions of
    the heads that the norms of q and k in ``base`` return.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_pairs: tuple[int, ...]
    norm_eps: float
    bias: bool = False
    query_bias: bool = False
    q_lora_rank: int | None = None
    qk_norm: bool = False
    select: BranchForm | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, least=0)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got 0")
        rank = self.q_lora_rank
        if rank is not None and (type(rank) is not int or not 1 <= rank <= MAX_SIZE):
            raise ValueError(f"q_lora_rank: expected 1 to {MAX_SIZE} or null, got {str(rank)[:80]}")
        _check_pairs(self)
        if 2 * len(self.rope_pairs) != self.qk_rope_head_dim:
            wanted = f"{self.qk_rope_head_dim / 2:g} pair numbers, half of qk_rope_head_dim"
            raise ValueError(f"rope_pairs: expected {wanted}, got {str(self.rope_pairs)[:80]}")
        for name in ("bias", "query_bias", "qk_norm"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}: expected true or false, got {str(getattr(self, name))[:80]}")
        if type(self.norm_eps) is not float or not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps: expected a positive number, got {str(self.norm_eps)[:80]}")

    @property
    def query_projection(self) -> str:
        """The name of the projection that outputs the query heads."""
        return "q_proj" if self.q_lora_rank is None else "q_b_proj"


LayerForm = GroupedForm | LatentForm


def is_own(config: Mapping[str, object]) -> bool:
    """True if a config.json is in attnlib's own form."""
    return config.get("model_type") == KIND


def own_config(base: Mapping[str, object], layers: Sequence[LayerForm] = ()) -> dict[str, object]:
    """Return the config.json of a model with config ``base`` and these attention layers.

    >>> own_config({"model_type": "llama"}, [GroupedForm(num_key_value_heads=2)])["layers"]
    [{'num_key_value_heads': 2}]
    """
    config = {"model_type": KIND, "version": VERSION, "base": dict(base)}
    return with_layers(config, map(plain_form, layers))


def with_layers(config: Mapping[str, object], layers: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Return a copy of ``config`` with other ``layers``, which are in the form of :func:`plain_form`."""
    return {**config, "layers": list(layers)}


def plain_form(form: LayerForm) -> dict[str, object]:
    """Return the description of a layer as plain data for JSON; layers without an index branch omit it."""
    plain = asdict(form)
    return plain if form.select is not None else {name: x for name, x in plain.items() if name != "select"}


def stored_name(name: str) -> str:
    """Return the stored name of an attnlib layer's weight, without the prefix of the attention module."""
    return f"{INNER}{name}"


def biases_in(weights: Container[str]) -> dict[str, bool]:
    """Return the bias fields of a :class:`LatentForm`, for a layer whose weights have these names."""
    return {
        "bias": "kv_a_proj_with_mqa.bias" in weights,
        "query_bias": "q_proj.bias" in weights or "q_b_proj.bias" in weights,
    }


def split_config(config: Mapping[str, object]) -> tuple[Mapping[str, object], dict[str, object]]:
    """Return the source model's config, and the field ``layers`` if ``config`` is in attnlib's own form."""
    if not is_own(config):
        return config, {}
    return base_of(config), {"layers": config["layers"]}


def base_of(config: Mapping[str, object]) -> dict[str, object]:
    """Return the source model's config from a config in attnlib's own form.

    Raises:
        ValueError: the source's config is missing, or the version of the form is unknown.
    """
    if config.get("version") != VERSION:
        raise ValueError(
            f"version: expected {VERSION}, got {str(config.get('version'))[:80]}; install a newer attnlib"
        )
    base = config.get("base")
    if not isinstance(base, Mapping) or is_own(base):
        raise ValueError(f"base: expected the config of another model, got {str(base)[:80]}")
    return dict(base)


def layers_of(config: Mapping[str, object]) -> tuple[LayerForm, ...]:
    """Return the description of each attention layer from a config in attnlib's own form.

    Raises:
        ValueError: the form of a layer is missing or invalid; the message names the layer.
    """
    return forms_from(config.get("layers"))


def forms_from(layers: object) -> tuple[LayerForm, ...]:
    """Return descriptions of layers from plain data: the inverse of :func:`plain_form` for a list.

    Raises:
        ValueError: the form of a layer is missing or invalid; the message names the layer.
    """
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"layers: expected one entry for each layer, got {str(layers)[:80]}")
    return tuple(_layer(index, fields) for index, fields in enumerate(layers))


def _layer(index: int, plain: object) -> LayerForm:
    if not isinstance(plain, Mapping):
        raise ValueError(f"layers: expected an object for layer {index}, got {str(plain)[:80]}")
    kind = LatentForm if "kv_lora_rank" in plain else GroupedForm
    try:
        made = dict(plain)
        if "select" in made:
            made["select"] = _made(BranchForm, made["select"], "select: ")
        return _made(kind, made, "")
    except (ValueError, TypeError) as error:
        raise ValueError(f"layers: layer {index}: {error}") from error


def _made(kind: type, plain: object, place: str) -> object:
    """Return a form from its fields; errors about unknown ones begin with ``place``."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{place}expected an object, got {str(plain)[:80]}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(str(name) for name in plain if name not in known):
        raise ValueError(f"{place}expected {', '.join(sorted(known))}, got {unknown[0][:80]!r}")
    try:
        return kind(**plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}{error}") from error


def _check_pairs(form: BranchForm | LatentForm) -> None:
    """Make ``rope_pairs`` a tuple; raise ValueError unless it lists numbers of rotary pairs."""
    pairs = form.rope_pairs
    if type(pairs) not in (list, tuple) or any(type(x) is not int or not 0 <= x < MAX_SIZE for x in pairs):
        raise ValueError(f"rope_pairs: expected a list of pair numbers from 0 on, got {str(pairs)[:80]}")
    object.__setattr__(form, "rope_pairs", tuple(pairs))


def _check_sizes(form: object, *, least: int) -> None:
    """Raise ValueError unless all integer fields are from ``least`` to MAX_SIZE."""
    for field in fields(form):
        value = getattr(form, field.name)
        if field.type is int and (type(value) is not int or not least <= value <= MAX_SIZE):
            raise ValueError(f"{field.name}: expected {least} to {MAX_SIZE}, got {str(value)[:80]}")
