"""attnlib's own form of config.json: any decoder, whose attention layers may differ in type and size.

``model_type`` is "attnlib", so that no other loader mistakes the folder for the original model. ``base`` is
the config of the source model, which still describes everything else, and ``layers`` has one entry per
attention layer.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

KIND, VERSION = "attnlib", 1
MAX_SIZE = 2**24  # limit for heads, channels and ranks: anything larger is a mistake or an attack
INNER = "layer."  # prefix of an attention's weight names; the rest is the name in attnlib's layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedForm:
    """A layer that differs from ``base`` only in its KV-head count."""

    num_key_value_heads: int

    def __post_init__(self) -> None:
        _check_sizes(self, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """A latent layer, with DeepSeek's field names; ``q_lora_rank`` is null if queries have no latent.

    Rotary pair c uses the frequency of pair ``rope_pairs[c]`` of the rope in ``base``. ``bias`` adds biases
    to the projections for which DeepSeek has the option, ``query_bias`` to the projection that outputs the
    query heads. ``norm_eps`` is the epsilon of the latent norms.
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

    def __post_init__(self) -> None:
        _check_sizes(self, least=0)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got 0")
        rank = self.q_lora_rank
        if rank is not None and (type(rank) is not int or not 1 <= rank <= MAX_SIZE):
            raise ValueError(f"q_lora_rank: expected 1 to {MAX_SIZE} or null, got {str(rank)[:80]}")
        if type(self.rope_pairs) not in (list, tuple) or any(
            type(pair) is not int for pair in self.rope_pairs
        ):
            raise ValueError(f"rope_pairs: expected a list of pair numbers, got {str(self.rope_pairs)[:80]}")
        if 2 * len(self.rope_pairs) != self.qk_rope_head_dim or any(
            not 0 <= x < MAX_SIZE for x in self.rope_pairs
        ):
            wanted = f"{self.qk_rope_head_dim / 2:g} pair numbers from 0 on, half of qk_rope_head_dim"
            raise ValueError(f"rope_pairs: expected {wanted}, got {str(self.rope_pairs)[:80]}")
        object.__setattr__(self, "rope_pairs", tuple(self.rope_pairs))
        for name in ("bias", "query_bias"):
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
    """Return a config of this form with these layers, each as :func:`plain_form` returns it."""
    return {**config, "layers": list(layers)}


def plain_form(form: LayerForm) -> dict[str, object]:
    """Return a layer's form as plain data for JSON."""
    return asdict(form)


def stored_name(name: str) -> str:
    """Return the name on disk, below its attention, of the weight ``name`` of an attnlib layer."""
    return f"{INNER}{name}"


def biases_in(weights: Container[str]) -> dict[str, bool]:
    """Return the bias fields of the :class:`LatentForm` of a layer with these weight names."""
    return {
        "bias": "kv_a_proj_with_mqa.bias" in weights,
        "query_bias": "q_proj.bias" in weights or "q_b_proj.bias" in weights,
    }


def split_config(config: Mapping[str, object]) -> tuple[Mapping[str, object], dict[str, object]]:
    """Return the stock model's config, and the fields that describe layers if ``config`` is of this form."""
    if not is_own(config):
        return config, {}
    return base_of(config), {"layers": config["layers"]}


def base_of(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config of the source model.

    Raises:
        ValueError: there is none, or the version of the form is unknown.
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
    """Return the form of each attention layer.

    Raises:
        ValueError: the form of a layer is missing or invalid; the message names the layer.
    """
    return forms_from(config.get("layers"))


def forms_from(layers: object) -> tuple[LayerForm, ...]:
    """Return the forms in a list of plain ones.

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
    known = {field.name for field in fields(kind)}
    if unknown := sorted(str(name) for name in plain if name not in known):
        raise ValueError(
            f"layers: layer {index}: expected {', '.join(sorted(known))}, got {unknown[0][:80]!r}"
        )
    try:
        return kind(**plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"layers: layer {index}: {error}") from error


def _check_sizes(form: object, *, least: int) -> None:
    """Raise ValueError if an integer field is not an int from ``least`` to MAX_SIZE."""
    for field in fields(form):
        value = getattr(form, field.name)
        if field.type is int and (type(value) is not int or not least <= value <= MAX_SIZE):
            raise ValueError(f"{field.name}: expected {least} to {MAX_SIZE}, got {str(value)[:80]}")
