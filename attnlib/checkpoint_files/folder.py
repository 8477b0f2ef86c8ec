"""Read a checkpoint folder and validate everything in it before use.

Only plain files directly in the folder are opened. Each has a size limit and must not change between reads.
Links are refused. On request, links of a download cache are followed: they lead from
``snapshots/<revision>`` to a plain file in the ``blobs`` folder next to ``snapshots``.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .header import TensorEntry, header_length, parse_header
from .plain_json import parse_object

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
MAX_CONFIG, MAX_INDEX, MAX_COPIED = 2**20, 64 * 2**20, 256 * 2**20  # largest accepted files, in bytes
STRANGE = frozenset('/\\:*?"<>|')  # some systems forbid these characters in file names
CHUNK = 2**24  # read this many bytes at a time; every element size divides it
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    GENERATION,
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A plain file of a checkpoint; its inode, size and modification time reveal later changes.

    ``name`` is its name in the folder, and ``path`` its real location, even if the folder has only a link.
    """

    path: Path
    name: str
    size: int
    identity: tuple[int, ...]

    @classmethod
    def at(cls, path: Path, *, limit: int | None = None, follow_links: bool = False) -> "SourceFile":
        """Return the file at ``path``, at most ``limit`` bytes long.

        With ``follow_links``, it may also be a link of a download cache.

        Raises:
            CheckpointError: the file is missing, a link, not a plain file, unreadable or too large.
        """
        place = _blob(path) if follow_links and path.is_symlink() else path
        with _open_plain(place) as file:
            status = os.fstat(file.fileno())
        if limit is not None and status.st_size > limit:
            raise CheckpointError(f"{path.name}: expected at most {limit} bytes, got {status.st_size}")
        return cls(place, path.name, status.st_size, _identity(status))

    def check(self) -> None:
        """Raise CheckpointError if the file has changed since it was first seen."""
        self._open().close()

    def sha256(self, advance: Callable[[int], object] = lambda count: None) -> str:
        """Return the sha256 of the file; ``advance`` is called with the number of bytes after each read."""
        digest = hashlib.sha256()
        for part in self.chunks(0, self.size, buffer_for(self.size)):
            digest.update(part)
            advance(len(part))
        return digest.hexdigest()

    def read(self, start: int = 0, length: int | None = None) -> bytearray:
        """Return ``length`` bytes from offset ``start``, or all bytes to the end of the file."""
        buffer = bytearray(self.size - start if length is None else length)
        for _ in self.chunks(start, len(buffer), memoryview(buffer)):
            pass
        return buffer

    def chunks(self, start: int, length: int, into: memoryview) -> Iterator[memoryview]:
        """Yield ``length`` bytes from offset ``start`` in pieces, each read into the buffer ``into``.

        Each piece is overwritten when the next one is read.
        """
        with self._open() as file:
            file.seek(start)
            while length:
                part = into[: min(length, len(into))]
                filled = 0
                while filled < len(part):
                    try:
                        count = file.readinto(part[filled:])
                    except OSError as error:
                        raise CheckpointError(f"{self.name}: cannot be read: {error.strerror}") from error
                    if not count:
                        raise CheckpointError(f"{self.name}: expected {self.size} bytes, got a shorter file")
                    filled += count
                length -= filled
                yield part

    def _open(self):
        file = _open_plain(self.path)
        if _identity(os.fstat(file.fileno())) != self.identity:
            file.close()
            raise CheckpointError(f"{self.name}: changed while in use; start again when nothing writes to it")
        return file


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: its file, and its dtype, shape and offset in that file."""

    file: SourceFile
    entry: TensorEntry

    def load(self) -> Tensor:
        """Read the tensor into new memory."""
        shape, dtype = self.entry.shape, self.entry.dtype
        if not self.entry.nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.file.read(self.entry.start, self.entry.nbytes), dtype=dtype).view(shape)

    def rows(self, first: int, last: int) -> Tensor:
        """Read only the rows ``first`` to ``last - 1`` of the tensor."""
        shape, dtype, start = self.entry.shape, self.entry.dtype, self.entry.start
        row = self.entry.nbytes // shape[0]
        return StoredTensor(
            self.file, TensorEntry(dtype, (last - first, *shape[1:]), start + first * row)
        ).load()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint folder: its config, its tensors by name, and its files."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    shards: tuple[SourceFile, ...]
    described_by: tuple[SourceFile, ...]
    copied: tuple[SourceFile, ...]
    left_behind: tuple[str, ...]
    hashes: dict[str, str] = field(
        default_factory=dict, compare=False
    )  # the sha256 of files read so far, by file name

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Every file that affects the result of a conversion."""
        return self.described_by + self.shards + self.copied

    def sha256(self, file: SourceFile, advance: Callable[[int], object] = lambda count: None) -> str:
        """Return the sha256 of a file in this folder, and read the file only if its hash is not known yet.

        Raises:
            CheckpointError: the file has changed since it was first seen.
        """
        if file.name in self.hashes:
            file.check()
        else:
            self.hashes[file.name] = file.sha256(advance)
        return self.hashes[file.name]


def buffer_for(size: int) -> memoryview:
    """Return a buffer of ``size`` bytes, or of CHUNK bytes if that is less, to read a file in pieces."""
    return memoryview(bytearray(min(size, CHUNK)))


def read_folder(source: Path, *, follow_links: bool = False, weights: bool = True) -> Checkpoint:
    """Validate the folder ``source`` and read everything but the tensors: config.json and shard headers.

    ``follow_links`` accepts a snapshot of a download cache, whose files are links. Without ``weights``, only
    config.json and the files to copy are read; the result has no shards and no tensors.

    Raises:
        CheckpointError: a file is missing, malformed or unsafe; the message names the file and a remedy.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: expected a folder with a checkpoint, got no folder")
    names = sorted(os.listdir(source))
    at = partial(SourceFile.at, follow_links=follow_links)
    if weights:
        _require_weights(source, names)
    config = at(source / CONFIG, limit=MAX_CONFIG)
    described_by, weight_map, listed = (config,), None, {}
    if weights and INDEX in names:
        index = at(source / INDEX, limit=MAX_INDEX)
        described_by += (index,)
        weight_map = _weight_map(parse_object(index.read(), INDEX))
        for tensor, name in weight_map.items():
            listed.setdefault(name, set()).add(tensor)
    shard_names = sorted(listed) if weight_map is not None else [WEIGHTS] * weights
    shards = tuple(at(source / name) for name in shard_names)
    tensors = {}
    for shard in shards:
        entries = _header(shard)
        if weight_map is not None:
            _agree(entries, listed[shard.name], shard.name)
        tensors |= {tensor: StoredTensor(shard, entry) for tensor, entry in entries.items()}
    limits = dict.fromkeys(COPIED, MAX_COPIED) | {GENERATION: MAX_CONFIG}
    copied = tuple(at(source / name, limit=limit) for name, limit in limits.items() if name in names)
    read = {file.name for file in described_by + shards + copied}
    left = tuple(name for name in names if name not in read)
    return Checkpoint(
        source, parse_object(config.read(), CONFIG), tensors, shards, described_by, copied, left
    )


def _require_weights(source: Path, names: Sequence[str]) -> None:
    """Raise CheckpointError unless the folder has exactly one set of safetensors weights."""
    if WEIGHTS in names and INDEX in names:
        raise CheckpointError(f"{source}: expected {WEIGHTS} or {INDEX}, got both; remove one of them")
    if WEIGHTS not in names and INDEX not in names:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        advice = (
            f"; {pickles[0]} may run code when it is opened: convert it to safetensors elsewhere"
            if pickles
            else ""
        )
        raise CheckpointError(f"{source}: expected {WEIGHTS} or {INDEX}, got neither{advice}")


def _weight_map(index: dict) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{INDEX}: weight_map: expected the file name of each tensor, got {str(weight_map)[:80]}"
        )
    for tensor, name in weight_map.items():
        if not _is_shard_name(name):
            raise CheckpointError(
                f"{INDEX}: weight_map[{tensor!r}]: expected the plain name of a .safetensors file in the "
                f"same folder, got {str(name)[:80]!r}"
            )
    return weight_map


def _is_shard_name(name: object) -> bool:
    """True if ``name`` is a safe shard name: it means a file in the folder itself on every system."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name.encode()) > 255:
        return False
    return name.isprintable() and STRANGE.isdisjoint(name) and not name.startswith((".", " "))


def _header(file: SourceFile) -> dict[str, TensorEntry]:
    length = header_length(file.read(0, min(8, file.size)), file.size, file.name)
    return parse_header(file.read(8, length), file.size, file.name)


def _agree(entries: Mapping[str, TensorEntry], listed: set[str], name: str) -> None:
    """Raise CheckpointError unless a shard holds exactly the tensors that the index lists for it.

    This also ensures that no tensor is in two shards.
    """
    for tensor in sorted(listed - entries.keys()):
        raise CheckpointError(
            f"{name}: expected {tensor!r}, which {INDEX} lists for it, got a file without it"
        )
    for tensor in sorted(entries.keys() - listed):
        raise CheckpointError(f"{name}: holds {tensor!r}, which {INDEX} lists elsewhere or not at all")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _blob(path: Path) -> Path:
    """Return the target of the snapshot link ``path``, which must be a blob of the same cache.

    Raises:
        CheckpointError: the folder is not a snapshot, or the link leads elsewhere.
    """
    snapshots, to = path.parent.resolve().parent, PurePosixPath(os.readlink(path))
    blobs = snapshots.parent / "blobs"
    if snapshots.name != "snapshots" or blobs.is_symlink():
        raise CheckpointError(
            f"{path.name}: expected a plain file or a link of a download cache, got another link; put the "
            "file itself there, as `cp -L` does"
        )
    if to.parts != ("..", "..", "blobs", to.name):
        raise CheckpointError(
            f"{path.name}: expected a link to ../../blobs, as in a download cache, got {str(to)!r}"
        )
    return blobs / to.name


def _open_plain(path: Path):
    try:
        # O_NOFOLLOW rejects links, and O_NONBLOCK avoids waiting for a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: expected in {path.parent}, and it is missing") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise CheckpointError(f"{path.name}: cannot be opened: {error.strerror}") from error
        advice = "for a download cache use `hf download --local-dir` or follow_links (convert --follow-links)"
        raise CheckpointError(f"{path.name}: expected a plain file, got a link; {advice}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name}: expected a plain file, got something else")
    return os.fdopen(descriptor, "rb", buffering=0)
