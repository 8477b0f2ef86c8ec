"""Run a checkpoint's decoder with only one layer in memory at a time.

transformers builds the model without memory for its weights. One forward pass records all arguments that each
layer gets besides hidden states: masks, positions and rotary angles. Then one layer after another loads its
weights, transforms the hidden states, and frees the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoint_files.folder import Checkpoint, StoredTensor
from ..checkpoint.errors import CheckpointError
from .decoder import ROPES, names_of, prefix_of, without_weights
from .experts import Parts, parts_of


class TextLayers:
    """The decoder layers of a checkpoint's text model, in fp32 on ``device``.

    Raises:
        CheckpointError: this type of model cannot be run layer by layer, or a weight is missing or has
            the wrong size.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu"):
        self.checkpoint: Checkpoint = checkpoint
        self.device: torch.device | str = device
        self._base = without_weights(checkpoint)
        self._names = names_of(self._base)
        for name in ROPES:
            if getattr(self._base, name, None) is not None:
                getattr(self._base, name).to(device)
        self._prefix = prefix_of(checkpoint, self._names)
        self._arguments: list[_Arguments] = []
        for index, layer in enumerate(self._layers):
            self._stored(layer, self._layer_prefix(index))

    @property
    def _layers(self) -> nn.ModuleList:
        return getattr(self._base, self._names.layers)

    def _layer_prefix(self, index: int) -> str:
        """Return the prefix of a layer's weight names."""
        return f"{self._prefix}{self._names.layers}.{index}."

    def __len__(self) -> int:
        return len(self._layers)

    def embedded(self, tokens: Tensor) -> list[Tensor]:
        """Return the hidden states before the first layer, ``[1, length, m]`` for each row of ``tokens``.

        ``tokens`` is ``[samples, length]``.

        Raises:
            CheckpointError: a token has no embedding.
        """
        stored = self._entry(f"{self._prefix}{self._names.embedding}.weight")
        words = stored.entry.shape[0]
        if tokens.max() >= words:
            raise CheckpointError(
                f"tokenizer.json: expected tokens below {words}, the number of embeddings, "
                f"got {int(tokens.max())}"
            )
        used, places = tokens.unique(return_inverse=True)
        self._embed_by(_rows(stored, used).to(self.device, torch.float32, copy=True))
        with self._positions(), self._recording(), torch.no_grad():
            states = [
                self._base(sample[None].to(self.device), use_cache=False)[0].clone() for sample in places
            ]
        getattr(self._base, self._names.embedding).to("meta")
        return states

    def _embed_by(self, rows: Tensor) -> None:
        """Make ``rows`` the embedding weight, and let transformers initialize the embedding's buffers."""
        embedding = getattr(self._base, self._names.embedding)
        embedding.padding_idx = None
        for name, buffer in [*embedding.named_buffers()]:
            embedding.register_buffer(name, torch.empty_like(buffer, device=self.device), persistent=False)
        embedding.weight = nn.Parameter(rows[:0])
        self._base._init_weights(embedding)
        embedding.weight = nn.Parameter(rows, requires_grad=False)

    @contextmanager
    def _positions(self) -> Iterator[None]:
        """Load the weights of other modules, such as learned positions, until the ``with`` block ends."""
        beside = {name: child for name, child in self._base.named_children() if name not in self._names}
        weighty = {name: child for name, child in beside.items() if [*child.parameters()]}
        try:
            for name, child in weighty.items():
                self.load(child, f"{self._prefix}{name}.")
            yield
        finally:
            for child in weighty.values():
                child.to("meta")

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Make layers only record their arguments, and the final norm do nothing, inside a ``with`` block."""
        layers, norm = self._layers, getattr(self._base, self._names.norm)
        recorders = [_Recorder() for _ in layers]
        setattr(self._base, self._names.layers, nn.ModuleList(recorders))
        setattr(self._base, self._names.norm, nn.Identity())
        try:
            yield
        finally:
            setattr(self._base, self._names.layers, layers)
            setattr(self._base, self._names.norm, norm)
        self._arguments = [recorder.arguments for recorder in recorders]

    def load_norm(self) -> nn.Module:
        """Return the norm after the last layer, with its weights loaded."""
        norm = getattr(self._base, self._names.norm)
        self.load(norm, f"{self._prefix}{self._names.norm}.")
        return norm

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Yield a layer with its weights, which are freed at the end of the block.

        Call the layer with hidden states only; :meth:`embedded` has recorded its other arguments.
        """
        layer = self._layers[index]
        try:
            self.load(layer, self._layer_prefix(index))
            yield _BoundLayer(layer, self._arguments[index])
        finally:
            layer.to("meta")

    def load(self, module: nn.Module, prefix: str) -> None:
        """Load a module's weights from the checkpoint, where their names start with ``prefix``.

        Raises:
            CheckpointError: a weight is missing or has the wrong size.
        """
        wanted = module.state_dict()  # parameters and buffers
        for name, parts in self._stored(module, prefix).items():
            # Copy weights to new memory, because the alignment of a matrix affects rounding in its products.
            weight = torch.empty_like(wanted[name], dtype=torch.float32, device=self.device)
            stacked = weight.dim() > len(self._entry(parts[0][0]).entry.shape)
            for row, names in zip(weight if stacked else [weight], parts, strict=True):
                row, start = torch.atleast_1d(row), 0
                # Transfer in the stored dtype, which is often smaller than fp32, and convert on the device.
                for part in map(torch.atleast_1d, map(self.tensor, names)):
                    row[start : (start := start + len(part))] = part.to(self.device)
            module.load_state_dict({name: weight}, assign=True, strict=False)

    def tensor(self, name: str) -> Tensor:
        """Load a tensor of the checkpoint in its stored dtype."""
        return self._entry(name).load()

    def _stored(self, module: nn.Module, prefix: str) -> dict[str, Parts]:
        """Return the names of the stored tensors that make up each weight of a module."""
        found = {}
        for name, wanted in module.state_dict().items():
            parts = parts_of(prefix + name, self.checkpoint.tensors)
            found[name] = ((prefix + name,),) if parts is None else parts
            shapes = [[self._entry(part).entry.shape for part in row] for row in found[name]]
            got = _shape(shapes, stacked=wanted.dim() > len(shapes[0][0]))
            if got != tuple(wanted.shape):
                raise CheckpointError(
                    f"{found[name][0][0]}: expected {name} {list(wanted.shape)}, as transformers reads "
                    f"config.json, got {list(got)}"
                )
        return found

    def _entry(self, name: str) -> StoredTensor:
        stored = self.checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{name}: required to run the model over text, and it is missing")
        return stored


def through(module: nn.Module, states: Tensor) -> Tensor:
    """Run a module on hidden states without recording gradients."""
    with torch.no_grad():  # needed here, as each thread has its own grad mode
        return module(states)


class _Arguments(NamedTuple):
    """The arguments that a decoder layer gets besides the hidden states."""

    args: tuple[object, ...]
    kwargs: dict[str, object]


class _BoundLayer(nn.Module):
    """A decoder layer bound to its other arguments, so that it is called with hidden states only."""

    def __init__(self, layer: nn.Module, arguments: _Arguments):
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layer(hidden_states, *self.arguments.args, **self.arguments.kwargs)


class _Recorder(nn.Module):
    """Replaces a decoder layer: records its arguments and returns the hidden states unchanged."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.arguments = _Arguments(args, kwargs)
        return hidden_states


def _shape(shapes: list[list[tuple[int, ...]]], *, stacked: bool) -> tuple[int, ...]:
    """Return the shape that results from concatenating each row of tensors and stacking the rows.

    Rows are stacked only if ``stacked``. The result is () if the shapes do not fit together.
    """
    if () in shapes[0]:  # a number
        return ()
    rows = {(sum(shape[0] for shape in row), *row[0][1:]) for row in shapes}
    tails = {shape[1:] for row in shapes for shape in row}
    if len(rows) != 1 or len(tails) != 1:
        return ()
    return ((len(shapes),) if stacked else ()) + rows.pop()


def _rows(stored: StoredTensor, used: Tensor) -> Tensor:
    """Read the rows of a stored tensor at the indices ``used``, which are in ascending order."""
    ends = (used.diff() > 1).nonzero().flatten() + 1
    return torch.cat([stored.rows(int(run[0]), int(run[-1]) + 1) for run in used.tensor_split(ends.tolist())])
