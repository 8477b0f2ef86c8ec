"""Compute the calibration of each layer of a checkpoint on a text, one layer after another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..calibration import Calibration, observe
from ..checkpoint.errors import CheckpointError
from ..checkpoint.model import CheckpointModel
from .freed import give_back
from .layers import TextLayers
from .workers import side_by_side


class NonFiniteError(CheckpointError):
    """The inputs of a layer are not finite."""


class TextCalibration:
    """A callable that calibrates layers on ``tokens`` ``[samples, length]``; its argument is a layer's index.

    The layers run in fp32; on a GPU, products use TF32, which represents bf16 weights exactly. Layers run in
    order, so a call for an earlier layer starts again at the first one. The hidden states of all tokens stay
    on ``device`` and take ``4 * m`` bytes per token; calibrations are on the CPU. ``advance`` is called after
    each sample of each layer. On a CPU, results are bit-identical for any number of torch threads.

    Raises:
        CheckpointError: this type of model cannot be run layer by layer; a weight of the layers is
            missing, has the wrong size or is not finite; or a token has no embedding.
    """

    def __init__(
        self,
        model: CheckpointModel,
        tokens: Tensor,
        device: torch.device | str = "cpu",
        *,
        advance: Callable[[], object] = lambda: None,
    ):
        self.model: CheckpointModel = model
        self.tokens: Tensor = tokens
        self.device: torch.device | str = device
        self.advance: Callable[[], object] = advance
        self.layers: TextLayers = TextLayers(model.checkpoint, device)
        self._states: list[Tensor] | None = None
        self._index, self._last = -1, None

    def __call__(self, index: int) -> Calibration:
        if self._states is None or index < self._index or (index == self._index and self._last is None):
            self._index, self._last, self._states = -1, None, self.layers.embedded(self.tokens)
        while self._index < index:
            self._last = self._next(self._index + 1)
            self._index += 1
        return self._last

    @property
    def states(self) -> list[Tensor]:
        """The hidden states after the latest layer that ran: ``[1, length, m]`` for each sample."""
        assert self._states is not None
        return self._states

    def go_on(self, index: int, states: list[Tensor]) -> None:
        """Continue at layer ``index``, whose input hidden states are ``states``."""
        self._states = None
        self.layers.embedded(self.tokens)  # records the layers' arguments besides hidden states
        self._index, self._last = index - 1, None
        self._states = [x.to(self.device, copy=True) for x in states]

    def _next(self, index: int) -> Calibration:
        # observe() overwrites the hidden states batch by batch, so they are invalid if it raises an error.
        states, self._states = self.states, None
        # q_proj, or the projection fused with it, gets the same input as its attention layer.
        first = f"layer.{self.model.family.attention}.{self.model.family.weights[0][0]}"
        try:
            with (
                self.layers.layer(index) as layer,
                side_by_side(self.device) as workers,
                _quick_products(self.device),
            ):
                # Nobody reads the calibration of a layer without attention, so any module will do.
                has_attention = index in self.model.layers
                seen = layer.get_submodule(first) if has_attention else layer
                advance = self.advance if has_attention else lambda: None
                found = observe(layer, seen, states, workers=workers, advance=advance)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise NonFiniteError(
                f"layer {index}, over text: {error}; weights up to this layer are NaN, infinite or too large"
            ) from error
        give_back()
        self._states = states
        return found.to("cpu")


@contextmanager
def _quick_products(device: torch.device | str) -> Iterator[None]:
    """Use TF32 for products on a GPU inside a ``with`` block; it is eight times as fast as fp32.

    TF32 rounds factors to 11 bits, and bf16 has 8. Moments are not affected, as they are summed in fp64.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before if torch.device(device).type == "cpu" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
