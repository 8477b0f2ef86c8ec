"""Refuse a config.json that asks for code, for files elsewhere, or for more weights than the folder can
hold.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping

from .errors import CheckpointError
from .folder import CONFIG, Checkpoint

CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")  # they name code that a loader would run
PACKED_KEYS = ("quantization_config", "compression_config")
FILE_KEYS = ("transformers_weights", "configuration_files")  # they name other files to read
# A choice of the caller's, not of a folder's; transformers would download what an implementation names.
CHOSEN = re.compile(r"_?(attn|experts)_implementation(_internal)?|return_dict")
FLAGS = (
    "output_hidden_states",
    "output_attentions",
    "return_dict",
)  # a forward, and not the constructor, reads them
EPSILON = re.compile(r"(.*_)?eps(ilon)?")
# Python loops this often when it builds a model.
LAYERS = re.compile(r"(.*_)?(layers?|depths?)")
PARTS = re.compile(r"(.*_)?(blocks|stages|experts|codebooks|labels)")
MOST_LAYERS, MOST_PARTS = 64, 4096  # that are built also where a folder has fewer tensors
# Other counts are widths of weights, which the folder would have, but for those that are no sizes.
NO_SIZE = re.compile(
    r".*(token|position|window|length|theta|seed|max|interval|factor|period|num_ctx|n_ctx).*"
)
MOST_SIZE = 2**20  # likewise


def plain_config(checkpoint: Checkpoint) -> dict[str, object]:
    """The config.json of a folder without the names of code to run and of implementations of attention.

    Of a folder that was read without its weights no count is bounded.

    Raises:
        CheckpointError: packed weights; other files, or an implementation of attention to download; a flag
        that is
            none, or a negative epsilon; or more layers, parts or channels than the folder's tensors can be.
            Names the field.
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
                f"{CONFIG}: {key}: expected no name of the Hub, whose code would be downloaded, got "
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
                    f"{CONFIG}: {key}: expected at most {most}, for the folder has {len(checkpoint.tensors)} "
                    f"tensors of {elements} elements, got {_short(count)}; it belongs to other weights, or "
                    "is a mistake"
                )
    return without(checkpoint.config, lambda key: key in CODE_KEYS or CHOSEN.fullmatch(key) is not None)


def without_code(config: Mapping[str, object]) -> dict[str, object]:
    """``config``, and all objects in it, without keys that name code."""
    return without(config, CODE_KEYS.__contains__)


def without(config: Mapping[str, object], drops: Callable[[str], bool]) -> dict[str, object]:
    """``config``, and all objects in it, without the keys that ``drops`` is true of."""
    return {
        key: without(value, drops) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not drops(key)
    }


def require_unpacked(config: Mapping[str, object]) -> None:
    """Raises CheckpointError for packed weights, with the name of what packed them."""
    for key, packed in _fields(config):
        if key in PACKED_KEYS and packed is not None:
            method = packed.get("quant_method") if isinstance(packed, Mapping) else None
            by = f" by {method[:80]!r}" if isinstance(method, str) else ""
            raise CheckpointError(
                f"{CONFIG}: {key}: expected plain weights, got some packed{by}, which cannot be read; "
                "take the original, or dequantise it elsewhere first"
            )


def _most(key: str, tensors: int, elements: int) -> float:
    """The greatest count that a field of this name may be."""
    if NO_SIZE.fullmatch(key):
        return math.inf
    if LAYERS.fullmatch(key):
        return max(MOST_LAYERS, tensors)
    return max(MOST_PARTS, tensors) if PARTS.fullmatch(key) else max(MOST_SIZE, elements)


def _fields(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every field of an object and of the objects in it."""
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
