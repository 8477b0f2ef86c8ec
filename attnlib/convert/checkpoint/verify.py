"""The written result, read again: every shard by another parser and by its sha256, then the caller's own
check.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.header import DTYPES
from .at_once import read_at_once
from .errors import CheckpointError, VerificationError
from .plan import Plan, Shard

Errors = Mapping[str, Mapping[str, float | None]]
Check = Callable[[Path, Errors], Mapping[str, object] | None]


def verify_shards(
    folder: Path, plan: Plan, hashes: Mapping[str, str], advance: Callable[[int], object]
) -> list[str]:
    """The names of shards that are not what was written; ``advance`` is told of the bytes that were read."""
    intact = read_at_once(partial(_is_intact, folder, hashes), plan.shards, advance)
    return [shard.name for shard, is_intact in zip(plan.shards, intact, strict=True) if not is_intact]


def run_check(check: Check | None, folder: Path, errors: Errors) -> dict[str, object]:
    """What the report says of ``check``: its measures, why it failed, or that there was none.

    It is told the ``errors`` of each layer, so that it can hold a conversion to what it claims.
    """
    if check is None:
        return {"check": "none"}
    try:
        return {"check": "passed", "measures": dict(check(folder, errors) or {})}
    except VerificationError as error:
        return {"check": "failed", "reason": str(error)}


def file_sha256(path: Path, advance: Callable[[int], object] = lambda count: None) -> str:
    """The sha256 of a plain file.

    Raises:
        CheckpointError: it is missing, a link or unreadable.
    """
    return SourceFile.at(path).sha256(advance)


def _is_intact(
    folder: Path, hashes: Mapping[str, str], shard: Shard, advance: Callable[[int], object]
) -> bool:
    from safetensors import SafetensorError, safe_open  # not above: --help of all commands does without it

    names = {dtype: name for name, dtype in DTYPES}
    planned = {name: (names[out.entry.dtype], list(out.entry.shape)) for name, out in shard.outputs.items()}
    try:
        with safe_open(folder / shard.name, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            held = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        return held == planned and file_sha256(folder / shard.name, advance) == hashes[shard.name]
    except (SafetensorError, CheckpointError, OSError):
        return False
