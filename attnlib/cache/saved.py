"""Save a sequence of a cache to a safetensors file, and load it bit for bit.

For each layer, the file has tensors ``{layer}.{plane}`` ``[t, g, *]``, such as ``0.k``, with the tokens that
the layer has retained, without left padding, and a tensor ``{layer}.numbers`` with the indices of these
tokens. The metadata has the length, the layouts and each layer's rotary convention.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..internal.checks import INT32
from ..internal.files import write_tensors
from ..kv import KVLayout
from .layer_cache import LayerCache
from .pages import Holding, SequenceHandle
from .sequences import Sequences

FORMAT = "attnlib sequence 1"
# Fields of a layout and planes that have another name in a file than in the code
FILE_NAMES = MappingProxyType(
    {"storage_dtype": "store", "rope_dim": "tail", "first_tokens": "keep_first", "k_rope": "k_tail"}
)


class CacheAccess(Protocol):
    """The part of a KVCache that :func:`load` uses."""

    layouts: Sequence[KVLayout]
    page_size: int

    def admit(self) -> list[SequenceHandle]: ...
    def step(self, tokens: Mapping[SequenceHandle, int]) -> AbstractContextManager[Sequence[LayerCache]]: ...
    def release(self, handle: SequenceHandle) -> None: ...


class SequenceFile(NamedTuple):
    """The contents of a saved sequence: its length, and each layer's rotary convention and tensors.

    ``rollback`` is the ``rollback`` of the cache that saved the file, or -1 if the file does not contain it.
    """

    length: int
    rollback: int
    conventions: Sequence[str | None]
    numbers: Sequence[Tensor]
    planes: Sequence[Mapping[str, Tensor]]

    def rows(self, layer: int, begin: int, end: int) -> dict[str, Tensor]:
        """Return a layer's stored tensors for the tokens ``[begin, end)``, with zeros for dropped tokens."""
        numbers, made = self.numbers[layer], {}
        first, stop = torch.searchsorted(numbers, torch.tensor((begin, end))).tolist()  # `numbers` ascend
        into = numbers.narrow(0, first, stop - first) - begin
        for name, plane in self.planes[layer].items():
            made[name] = torch.zeros(end - begin, *plane.shape[1:], dtype=plane.dtype)
            made[name].view(torch.uint8).index_copy_(
                0, into, plane.view(torch.uint8).narrow(0, first, stop - first)
            )
        return made


def tokens_of(holding: Holding, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the indices of a sequence's retained tokens, counted after its padding, and their slots."""
    pages = torch.tensor([*holding.first, *holding.pages], dtype=torch.int64)
    index = torch.cat((torch.arange(len(holding.first)), holding.dropped + torch.arange(len(holding.pages))))
    within = torch.arange(page_size)
    numbers, slots = ((x[:, None] * page_size + within).flatten() for x in (index, pages))
    there = (numbers >= holding.padding) & (numbers < holding.length)
    there &= (numbers >= holding.missing) | (numbers < len(holding.first) * page_size)
    return numbers[there] - holding.padding, slots[there]


def save(path: Path, layers: Sequence[LayerCache], sequences: Sequences, handle: SequenceHandle) -> None:
    """Write the tokens of a sequence to a file."""
    tensors, numbers, holdings = {}, {}, sequences.holdings(handle)
    for n, layer in enumerate(layers):
        window = layer.layout.window_class
        numbers[n], slots = tokens_of(holdings[window], sequences.allocators[window].page_size)
        tensors[f"{n}.numbers"] = numbers[n].int()
        for name, plane in layer.planes.items():
            tensors[f"{n}.{_in_file(name)}"] = plane.flatten(0, 1)[slots.to(plane.device)].cpu()
    first = next(iter(holdings.values()))
    metadata = {
        "format": FORMAT,
        "length": first.length - first.padding,
        "rollback": sequences.rollback,
        "layouts": [_as_json(layer.layout) for layer in layers],
        "conventions": [layer.convention for layer in layers],
    }
    write_tensors(path, tensors, {name: json.dumps(x) for name, x in metadata.items()})


def read(path: Path, layouts: Sequence[KVLayout]) -> SequenceFile:
    """Read a saved sequence for a cache whose layers have these ``layouts``.

    Raises:
        ValueError: :func:`save` did not write the file, or its layouts differ.
        OSError: the file cannot be read, or is a folder.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file that cache.save() wrote, got a folder")
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ValueError(f"{path}: expected a file that cache.save() wrote, got something else")
    try:
        with safe_open(path, "pt") as file:
            metadata = {name: json.loads(x) for name, x in (file.metadata() or {}).items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:  # JSON may be nested too deeply
        raise ValueError(
            f"{path}: expected a file that cache.save() wrote, got {str(error)[:200]}"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a file that cache.save() wrote, got format "
            f"{str(metadata.get('format'))[:80]!r}"
        )
    mine = [_as_json(layout) for layout in layouts]
    if metadata.get("layouts") != mine:
        raise ValueError(
            f"{path}: expected layouts like this cache's, {mine}, got {str(metadata.get('layouts'))[:400]}"
        )
    length, conventions, rollback = (
        metadata.get("length"),
        metadata.get("conventions"),
        metadata.get("rollback", -1),
    )
    if type(length) is not int or not 0 <= length <= INT32 or not isinstance(conventions, list):
        raise ValueError(f"{path}: its length and conventions are not what cache.save() writes")
    numbers = [_numbers(path, tensors.get(f"{n}.numbers"), length) for n in range(len(layouts))]
    planes = []
    for n, layout in enumerate(layouts):
        planes.append({name: tensors.get(f"{n}.{_in_file(name)}") for name in layout.planes})
        for name, (heads, width, dtype) in layout.planes.items():
            shape, x = (len(numbers[n]), heads, *((width,) if width else ())), planes[n][name]
            if x is None or x.shape != shape or x.dtype != dtype:
                got = "none" if x is None else f"{x.dtype} {tuple(x.shape)}"
                raise ValueError(f"{path}: {n}.{_in_file(name)}: expected {dtype} {shape}, got {got}")
    if len(conventions) != len(layouts) or not all(x is None or isinstance(x, str) for x in conventions):
        raise ValueError(f"{path}: conventions: expected one for each layer, got {conventions}")
    if type(rollback) is not int:
        raise ValueError(f"{path}: rollback: expected a count, got {str(rollback)[:80]}")
    return SequenceFile(length, rollback, conventions, numbers, planes)


def load(path: Path, cache: "CacheAccess", sequences: Sequences) -> SequenceHandle:
    """Start a sequence of a cache with the tokens of a file."""
    saved = read(path, cache.layouts)
    (handle,) = cache.admit()
    try:
        for begin in range(0, saved.length, cache.page_size):  # page by page, so that windows drop old pages
            end = min(begin + cache.page_size, saved.length)
            with cache.step({handle: end - begin}) as layers:
                for n, layer in enumerate(layers):
                    layer._put(saved.rows(n, begin, end), saved.conventions[n])
        for n, layout in enumerate(cache.layouts):
            holding = sequences.holdings(handle)[layout.window_class]
            if not _is_enough(saved, n, layout, holding, sequences):
                raise ValueError(
                    f"{path}: layer {n} of this cache keeps more than the file has; load it into a cache of "
                    "the same page_size and rollback as the one that saved it"
                )
    except BaseException:
        cache.release(handle)
        raise
    return handle


def _is_enough(
    saved: SequenceFile, layer: int, layout: KVLayout, holding: Holding, sequences: Sequences
) -> bool:
    """True if a file holds every token that later queries of the sequence can see.

    A truncated or left-padded sequence has dropped more tokens behind its window than its length suggests.
    The index of its first available token is then recorded as ``holding.missing``.
    """
    page_size = sequences.allocators[layout.window_class].page_size
    numbers, _ = tokens_of(holding, page_size)
    lacks = numbers[~torch.isin(numbers, saved.numbers[layer])]
    if not len(lacks):
        return True
    first, last = int(lacks[0]), int(lacks[-1])
    in_window = layout.window is not None and first >= holding.dropped * page_size
    if not in_window or last + layout.window > saved.length or sequences.rollback > saved.rollback:
        return False
    holding.missing = last + 1
    if not layout.first_tokens:
        holding.start = max(holding.start, holding.missing)
    return True


def _numbers(path: Path, x: Tensor | None, length: int) -> Tensor:
    """Validate the token indices of a layer, which must ascend, and return them as int64."""
    if x is None or x.dtype != torch.int32 or x.dim() != 1:
        raise ValueError(f"{path}: expected int32 numbers of each layer's tokens")
    if len(x) and (x[0] < 0 or x[-1] >= length or (x.diff() <= 0).any()):
        raise ValueError(f"{path}: numbers: expected tokens of a sequence of {length}, in order")
    return x.long()


def _as_json(layout: KVLayout) -> dict[str, object]:
    """Return a layout as JSON values, with its field names in files."""
    fields = asdict(layout)
    if not layout.index_dim:  # like files from before layouts had index keys
        fields = {name: x for name, x in fields.items() if not name.startswith("index_")}
    return {_in_file(name): x if isinstance(x, bool | int | None) else str(x) for name, x in fields.items()}


def _in_file(name: str) -> str:
    return FILE_NAMES.get(name, name)
