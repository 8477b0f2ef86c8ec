"""Make config.json safe to load: remove references to code, and reject other files and oversized models."""

import math
import re
from collections.abc import Callable, Iterator, Mapping

from .errors import CheckpointError
from .folder import CONFIG, Checkpoint

CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")  # a loader would run the code they name
PACKED_KEYS = ("quantization_config", "compression_config")
FILE_KEYS = ("transformers_weights", "configuration_files")  # these keys name other files to read
# The caller chooses these settings, not the folder: transformers would download an implementation by name.
CHOSEN = re.compile(r"_?(attn|experts)_implementation(_internal)?|return_dict")
# A model reads these flags only in its forward pass, so building it would not reveal a wrong type.
FLAGS = ("output_hidden_states", "output_attentions", "return_dict")
EPSILON = re.compile(r"(.*_)?eps(ilon)?")
# Building a model loops as often as these fields say, so with an absurd number it would never end.
LAYERS = re.compile(r"(.*_)?(layers?|depths?)")
PARTS = re.compile(r"(.*_)?(blocks|stages|experts|codebooks|labels)")
MOST_LAYERS, MOST_PARTS = 64, 4096  # allowed numbers of layers and parts, even with fewer tensors
# Any other integer is treated as the width of a weight and may not exceed the number of elements in the
# folder, unless its name matches this pattern.
NO_SIZE = re.compile(
    r".*(token|position|window|length|theta|seed|max|interval|factor|period|num_ctx|n_ctx).*"
)
MOST_SIZE = 2**20  # this width is always allowed, even if the folder has fewer elements


def plain_config(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a folder's config.json without fields that name remote code or attention implementations.

    Layer counts and sizes are not limited if the folder was read without its weights.

    Raises:
        CheckpointError: weights are packed; a field names other files or an implementation to download; a
            flag is not a boolean; an epsilon is negative; or a width, or a number of layers or other parts,
            is too large for the folder's tensors. The message names the field.
    """
    elements = sum(math.prod(stored.entry.shape) for stored in checkpoint.tensors.values())
    require_unpacked(checkpoint.config)
    for key, value in _fields(checkpoint.config):
        if key in FILE_KEYS:
            raise CheckpointError(
                f"{CONFIG}: {key}: expected no other files than the folder's usual ones, got "
                f"{_short(value)}; remove it"
            )
        if CHOSEN.fullmatch(key) and any("/" in name for name in _strings(value)):
            raise CheckpointError(
                f"{CONFIG}: {key}: expected no repository on the Hub, whose code would be downloaded, got "
                f"{_short(value)}; remove it"
            )
        if key in FLAGS and not isinstance(value, bool | None):
            raise CheckpointError(f"{CONFIG}: {key}: expected true or false, got {_short(value)}")
        if EPSILON.fullmatch(key) and isinstance(value, int | float) and value < 0:
            raise CheckpointError(f"{CONFIG}: {key}: expected a number of at least 0, got {_short(value)}")
        for count in _counts(value) if checkpoint.shards else ():
            most = _most(key, len(checkpoint.tensors), elements)
            if count > most:
                raise CheckpointError(
                    f"{CONFIG}: {key}: expected at most {most}, as the folder has {len(checkpoint.tensors)} "
                    f"tensors of {elements} elements, got {_short(count)}; it belongs to other weights, or "
                    "is a mistake"
                )
    return without(checkpoint.config, lambda key: key in CODE_KEYS or CHOSEN.fullmatch(key) is not None)


def without_code(config: Mapping[str, object]) -> dict[str, object]:
    """Return ``config`` without keys that name code, at any depth."""
    return without(config, CODE_KEYS.__contains__)


def without(config: Mapping[str, object], drops: Callable[[str], bool]) -> dict[str, object]:
    """Return ``config`` without the keys for which ``drops`` is true, at any depth."""
    return {
        key: without(value, drops) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not drops(key)
    }


def require_unpacked(config: Mapping[str, object]) -> None:
    """Raise CheckpointError if weights are packed (quantized); the message names the method."""
    for key, packed in _fields(config):
        if key in PACKED_KEYS and packed is not None:
            method = packed.get("quant_method") if isinstance(packed, Mapping) else None
            by = f" by {method[:80]!r}" if isinstance(method, str) else ""
            raise CheckpointError(
                f"{CONFIG}: {key}: expected plain weights, got weights packed{by}, which cannot be read; "
                "use the original model, or dequantise it first"
            )


def _most(key: str, tensors: int, elements: int) -> float:
    """Return the largest integer that config.json may have in the field ``key``."""
    if NO_SIZE.fullmatch(key):
        return math.inf
    if LAYERS.fullmatch(key):
        return max(MOST_LAYERS, tensors)
    return max(MOST_PARTS, tensors) if PARTS.fullmatch(key) else max(MOST_SIZE, elements)


def _fields(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield every field of a JSON object and of the objects inside it."""
    for key, value in config.items():
        yield key, value
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield from _fields(part)


def _strings(value: object) -> Iterator[str]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    yield from [value] if isinstance(value, str) else ()
    for part in parts:
        yield from _strings(part)


def _counts(value: object) -> list[int]:
    return [x for x in (value if isinstance(value, list) else [value]) if type(x) is int]


def _short(value: object) -> str:
    return str(value)[:80]
