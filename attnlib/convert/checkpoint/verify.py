"""Verify written files: parse each shard again, compare its sha256, and run the caller's check."""

from collections.abc import Callable, Mapping
from contextlib import suppress
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
    """Read all shards again, and return the names of those that differ from the written bytes.

    ``advance`` is called with the number of bytes after each read.
    """
    intact = read_at_once(partial(_is_intact, folder, hashes), plan.shards, advance)
    return [shard.name for shard, is_intact in zip(plan.shards, intact, strict=True) if not is_intact]


def run_check(check: Check | None, folder: Path, errors: Errors) -> dict[str, object]:
    """Run ``check`` and return its entry for the report: its measurements, or why it failed.

    The check gets the ``errors`` that the converter reported for each layer, to compare them with its own
    results. Without a check, the entry says ``none``.
    """
    if check is None:
        return {"check": "none"}
    try:
        return {"check": "passed", "measures": dict(check(folder, errors) or {})}
    except VerificationError as error:
        return {"check": "failed", "reason": str(error)}


def has_sha256(path: Path, sha256: str) -> bool:
    """True if ``path`` is a readable plain file with this sha256."""
    with suppress(CheckpointError):
        return SourceFile.at(path).sha256() == sha256
    return False


def _is_intact(
    folder: Path, hashes: Mapping[str, str], shard: Shard, advance: Callable[[int], object]
) -> bool:
    from safetensors import SafetensorError, safe_open  # imported only here, to keep --help fast

    names = {dtype: name for name, dtype in DTYPES}
    planned = {name: (names[out.entry.dtype], list(out.entry.shape)) for name, out in shard.outputs.items()}
    try:
        with safe_open(folder / shard.name, "pt") as file:
            names = file.keys()  # an open safetensors file is not iterable
            parts = {name: file.get_slice(name) for name in names}
            stored = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        return stored == planned and SourceFile.at(folder / shard.name).sha256(advance) == hashes[shard.name]
    except (SafetensorError, CheckpointError, OSError):
        return False
