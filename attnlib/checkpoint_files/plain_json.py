"""Parse JSON objects from untrusted files: duplicate keys, NaN and deep nesting are errors."""

import json
import math
from typing import Any

from .errors import CheckpointError

MAX_DEPTH = 32  # limits the nesting, because functions that copy the parsed objects are recursive


def parse_object(text: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, whose size the caller has limited.

    Raises:
        CheckpointError: ``text`` is not JSON or not an object, is nested too deep, or has a duplicate key
            or a number that JSON does not allow.
    """
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{name}: expected JSON, got something else: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected a JSON object, got a {type(value).__name__}")
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [part for inner in parts for part in inner if isinstance(part, dict | list)]
    if level:
        raise CheckpointError(f"{name}: expected JSON of at most {MAX_DEPTH} levels, got one nested deeper")
    return value


def dump(value: object) -> bytes:
    """Return ``value`` as readable JSON, with equal bytes for equal values."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = {}
    for name, item in pairs:
        name.encode()  # raises for a lone surrogate, because other parsers reject it
        if name in value:
            raise ValueError(f"the key {name!r} occurs twice")
        value[name] = item
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")
