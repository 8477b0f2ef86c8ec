"""The rope that a Hugging Face config.json describes, in the form of transformers 5 or an older one."""

from collections.abc import Mapping

from ...rope import Rope
from ...scaling import scaling_of
from .errors import CheckpointError
from .folder import CONFIG
from .model import shape_of
from .names import family_of

LEARNED = ("gpt2", "bert")  # their positions are rows of an embedding
THETA = 10_000.0  # transformers' own default
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_of(config: Mapping[str, object]) -> Rope | None:
    """The rope of ``config``, whose pairs are ``(c, c + p / 2)``; None for learned positions.

    It is in ``rope_parameters`` or, in older files, in ``rope_scaling`` with ``rope_theta`` beside it; where a file has
    both forms, what transformers reads counts. ``partial_rotary_factor`` turns the first part of each head only.

    Raises:
        CheckpointError: an unknown kind of rope, one kind for each kind of layer, or a number that is missing or
            impossible; or a model or a size that :func:`shape_of` refuses.
    """
    family = family_of(config.get("model_type"))
    if config["model_type"] in LEARNED:
        return None
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = config.get(key) or {}
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{CONFIG}: {key}: expected an object, got {str(fields)[:80]}")
    kind = fields.get("rope_type", fields.get("type", "default"))
    nested = any(isinstance(value, Mapping) for value in fields.values())
    if kind not in KINDS or nested:
        got = "one rope for each kind of layer" if nested else repr(str(kind)[:80])
        raise CheckpointError(
            f"{CONFIG}: {key}: expected a rope_type of {', '.join(KINDS)} for all layers, got {got}; "
            "such a model cannot be converted"
        )
    # A field of its own comes after one among the parameters.
    own = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    fields = own | {name: value for name, value in fields.items() if value is not None}
    share = fields.get("partial_rotary_factor", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise CheckpointError(f"{CONFIG}: partial_rotary_factor: expected a share of 1, got {str(share)[:80]}")
    try:
        dim = int(shape_of(config, family).head_dim * share)
        if config.get("original_max_position_embeddings") is not None:
            fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        scaling = scaling_of(fields, max_position=config.get("max_position_embeddings"))
        return Rope(dim, fields.get("rope_theta", THETA), scaling)
    except KeyError as error:
        raise CheckpointError(f"{CONFIG}: {key}: expected {error.args[0]} with {kind!r}, and it is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{CONFIG}: {key}: {error}") from error
