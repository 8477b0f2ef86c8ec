"""JSON from strangers: an object, no key twice, no NaN, never deeper than what reads it can stand."""

import json
import math
from typing import Any

from .errors import CheckpointError

MAX_DEPTH = 32  # of objects and lists in each other; what copies them recurses


def parse_object(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object that ``text`` holds; the caller has limited its size.

    Raises:
        CheckpointError: it is no JSON, no object, too deep, has a key twice, or a number that JSON has not.
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
    """The same bytes for equal values, and easy to read."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = {}
    for name, item in pairs:
        name.encode()  # half a surrogate pair raises: other parsers refuse it
        if name in value:
            raise ValueError(f"the key {name!r} occurs twice")
        value[name] = item
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
