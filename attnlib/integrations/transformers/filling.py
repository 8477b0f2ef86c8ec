"""Load the tensors of a checkpoint folder into a transformers model, reading each one when it is placed."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint_files import Checkpoint, CheckpointError, StoredTensor
from ...checkpoint_files.finite import count_nonfinite
from ...checkpoint_files.folder import CONFIG
from ...models.own_form import INNER

# A model may need this many more elements than its folder has: buffers are not stored, and if only a few
# weights are missing, a later check raises a better error.
SLACK = 2**22


class Filled:
    """The tensors of a checkpoint, and the errors and non-finite weights found while reading them.

    ``slices`` is the ``state_dict`` for ``from_pretrained``. A tensor with an integer or bool dtype is in
    ``integers`` instead, unless the model ``empty`` has a buffer of this name with such a dtype.
    """

    def __init__(self, checkpoint: Checkpoint, empty: nn.Module):
        self.checkpoint, self.folder = checkpoint, checkpoint.folder
        self.max_elements: int = elements_of(empty)
        self.failed: list[CheckpointError] = []
        self.nonfinite: dict[str, dict[str, int]] = {}
        counters = [name for name, x in empty.named_buffers() if not x.is_floating_point()]
        self.integers: dict[str, StoredTensor] = {
            name: stored
            for name, stored in checkpoint.tensors.items()
            if not stored.entry.dtype.is_floating_point
            and not any(_is_same(name, other) for other in counters)
        }
        self.slices: dict[str, Slice] = {
            name: Slice(name, stored, self)
            for name, stored in checkpoint.tensors.items()
            if name not in self.integers
        }

    def check(self, model: nn.Module, info: Mapping[str, Any], *, own: bool, allow_nonfinite: bool) -> None:
        """Raise CheckpointError if a weight is missing, superfluous, not finite, or has the wrong shape."""
        amiss = {
            what: sorted(map(str, info[f"{what}_keys"])) for what in ("missing", "mismatched", "unexpected")
        }
        for name, stored in self.integers.items() if amiss["missing"] else ():
            if _is_same(name, amiss["missing"][0]):
                raise CheckpointError(f"{name}: expected a floating dtype, got {stored.entry.dtype}")
        known = _numbered(model.state_dict())
        amiss["unexpected"] = [
            name
            for name in (*amiss["unexpected"], *self.integers)
            if (own and f".{INNER}" in name)
            or _is_beyond(name, known)
            or _is_beyond(f"{model.base_model_prefix}.{name}", known)
        ]
        for what, found in amiss.items():
            if found:
                raise CheckpointError(
                    f"{self.folder}: expected the weights of {type(model).__name__}, as {CONFIG} says, got "
                    f"{what} {found[0]}"
                )
        if self.nonfinite and not allow_nonfinite:
            listed = "; ".join(f"{name} {counts}" for name, counts in sorted(self.nonfinite.items())[:5])
            raise CheckpointError(
                f"{listed}: expected finite weights; pass allow_nonfinite=True to accept others"
            )
        if not allow_nonfinite:
            self._check_range(model)

    def _check_range(self, model: nn.Module) -> None:
        """Raise CheckpointError for a weight that is finite as stored but overflows the model's dtype."""
        stored = {x.entry.dtype for x in self.checkpoint.tensors.values() if x.entry.dtype.is_floating_point}
        largest = max((torch.finfo(dtype).max for dtype in stored), default=0.0)
        for name, x in model.named_parameters():
            if (
                x.is_floating_point()
                and torch.finfo(x.dtype).max < largest
                and (counts := count_nonfinite(x.detach()))
            ):
                raise CheckpointError(
                    f"{name} {counts}: expected weights within {x.dtype}, got larger ones; load them with "
                    "dtype=torch.bfloat16 or torch.float32, or pass allow_nonfinite=True"
                )


class Slice:
    """A stored tensor that transformers can use like a safetensors slice; ``x[...]`` reads it."""

    def __init__(self, name: str, stored: StoredTensor, filled: Filled):
        self._name, self._stored, self._filled = name, stored, filled

    def get_shape(self) -> list[int]:
        """Return the shape, without reading the tensor."""
        return list(self._stored.entry.shape)

    def __getitem__(self, index: Any) -> Tensor:
        try:
            tensor = self._read()
        except CheckpointError as error:
            self._filled.failed.append(error)
            raise
        if counts := count_nonfinite(tensor):
            self._filled.nonfinite[self._name] = counts
        return tensor[index]

    def _read(self) -> Tensor:
        if math.prod(self.get_shape()) > self._filled.max_elements:
            wanted = f"at most {self._filled.max_elements} elements, the whole model in {CONFIG}"
            raise CheckpointError(f"{self._name}: expected {wanted}, got {self.get_shape()}")
        return self._stored.load()


def require_size(empty: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a model is over twice as large as its folder, before memory is allocated."""
    stored = sum(math.prod(x.entry.shape) for x in checkpoint.tensors.values())
    wanted = elements_of(empty) + sum(x.numel() for x in empty.buffers())
    if wanted > 2 * stored + SLACK:
        raise CheckpointError(
            f"{CONFIG}: expected a model with the {stored} elements in the folder, got one with {wanted}; "
            "it belongs to other weights"
        )


def elements_of(empty: nn.Module) -> int:
    """Return the number of elements in a model's parameters, counting tied parameters once."""
    tied = getattr(empty, "all_tied_weights_keys", {})
    return sum(x.numel() for name, x in empty.named_parameters() if name not in tied)


def _is_same(name: str, other: str) -> bool:
    """True if two tensor names are equal, except that one may have an additional prefix."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def _numbered(names: Iterable[str]) -> dict[str, set[str]]:
    """Map each prefix of tensor names to the numbers that follow it, such as layer numbers."""
    found: dict[str, set[str]] = {}
    for name in names:
        for match in re.finditer(r"(?<=\.)[0-9]+(?=\.)", name):
            found.setdefault(name[: match.start()], set()).add(match[0])
    return found


def _is_beyond(name: str, known: Mapping[str, set[str]]) -> bool:
    """True if a tensor belongs to a layer, or another numbered module, that the model does not have."""
    return any(
        match[0] not in known.get(name[: match.start()], match[0])
        for match in re.finditer(r"(?<=\.)[0-9]+(?=\.)", name)
    )
