"""Parse and write headers of safetensors files, without reading the tensors.

A safetensors file starts with eight bytes that give the header's length (little-endian), followed by the
header (JSON) and all tensors. The safetensors package maps whole files into memory: they count as used
memory, and the process is killed if someone truncates a file. This parser makes plain reads possible instead.
It rejects every header that safetensors rejects.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .errors import CheckpointError
from .plain_json import parse_object

MAX_HEADER = 100_000_000  # the limit of the format, in bytes
DTYPES = (
    ("BOOL", torch.bool),
    ("U8", torch.uint8),
    ("I8", torch.int8),
    ("F8_E4M3", torch.float8_e4m3fn),
    ("F8_E5M2", torch.float8_e5m2),
    ("F8_E8M0", torch.float8_e8m0fnu),
    ("I16", torch.int16),
    ("U16", torch.uint16),
    ("F16", torch.float16),
    ("BF16", torch.bfloat16),
    ("I32", torch.int32),
    ("U32", torch.uint32),
    ("F32", torch.float32),
    ("I64", torch.int64),
    ("U64", torch.uint64),
    ("F64", torch.float64),
    ("C64", torch.complex64),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in a safetensors header: dtype, shape, and the offset of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_length(first: bytes, size: int, name: str) -> int:
    """Return the length of a header, given the ``first`` eight bytes of its file of ``size`` bytes.

    Raises:
        CheckpointError: the file is too short, or the header is longer than the format allows.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
        raise CheckpointError(
            f"{name}: expected a header of 2 to {MAX_HEADER} bytes inside the file, got {length} bytes in a "
            f"file of {size}; the file is truncated or not a safetensors file, download it again"
        )
    return length


def parse_header(header: bytes, size: int, name: str) -> dict[str, TensorEntry]:
    """Return the entries of all tensors in a file of ``size`` bytes, in file order.

    Raises:
        CheckpointError: the header is not JSON of the expected form; a dtype is unknown or not a whole
            number of bytes; or tensors overlap, leave gaps, occur twice or do not end at the end of the
            file.
    """
    if not header.startswith(b"{"):
        raise CheckpointError(
            f"{name}: expected the header to start with an opening brace, got {header[:1]!r}"
        )
    fields = parse_object(header, name)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{name}: __metadata__: expected strings by name, got {str(metadata)[:80]}")
    base = end = 8 + len(header)
    entries = {tensor: _entry(field, base, f"{name}: {tensor!r}") for tensor, field in fields.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    for tensor, entry in entries.items():
        if entry.start != end:
            raise CheckpointError(f"{name}: {tensor!r}: expected to start at byte {end}, got {entry.start}")
        end += entry.nbytes
    if end != size:
        raise CheckpointError(
            f"{name}: expected {end} bytes, as its header says, got {size}; download the file again"
        )
    return entries


def make_header(entries: Mapping[str, TensorEntry]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the bytes of a header for ``entries`` in this order, and the entries with their offsets.

    Tensors with wider elements must come first, so that each is aligned to its element size.
    """
    names = {dtype: name for name, dtype in DTYPES}
    fields, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor, entry in entries.items():
        assert offset % entry.dtype.itemsize == 0
        ends = [offset, offset + entry.nbytes]
        fields[tensor] = {"dtype": names[entry.dtype], "shape": list(entry.shape), "data_offsets": ends}
        offset += entry.nbytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    placed = {
        tensor: TensorEntry(entry.dtype, entry.shape, start + fields[tensor]["data_offsets"][0])
        for tensor, entry in entries.items()
    }
    return len(header).to_bytes(8, "little") + header, placed


def _entry(field: object, base: int, name: str) -> TensorEntry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{name}: expected a dtype, a shape and data_offsets, got {str(field)[:80]}")
    dtypes = dict(DTYPES)
    if not isinstance(field["dtype"], str) or field["dtype"] not in dtypes:
        raise CheckpointError(
            f"{name}: dtype: expected one of {', '.join(dtypes)}, got {str(field['dtype'])[:80]}"
        )
    shape, offsets = (
        _counts(field["shape"], f"{name}: shape"),
        _counts(field["data_offsets"], f"{name}: data_offsets"),
    )
    entry = TensorEntry(dtypes[field["dtype"]], shape, base + offsets[0] if offsets else 0)
    if len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
        raise CheckpointError(
            f"{name}: data_offsets: expected a span of {entry.nbytes} bytes, as {field['dtype']} "
            f"{list(shape)} takes, got {list(offsets)}"
        )
    return entry


def _counts(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(count) is int and 0 <= count < 2**63 for count in value):
        raise CheckpointError(f"{name}: expected a list of counts, got {str(value)[:80]}")
    return tuple(value)
