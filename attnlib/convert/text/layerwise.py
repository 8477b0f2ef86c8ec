"""Calibrations of a checkpoint's layers over text, one layer after another."""

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


class TextCalibration:
    """Gives the calibration of layer ``index`` of ``model`` over ``tokens`` ``[samples, length]``, in fp32.

    A GPU multiplies by TF32, which takes weights of bf16 as they are.

    Layers are run in order: one that is asked for behind the last costs a start from the first. Keeps the
    hidden states of all tokens, ``4 * m`` bytes a token, on ``device``; calibrations are on the CPU.
    ``advance`` is told of each sample that has passed a layer. On a CPU no bit depends on how many threads
    torch has.

    Raises:
        CheckpointError: the model is of a kind that cannot be run so, or a weight that the layers need is
        missing, of
            another size or not finite, or a token has no embedding.
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
        """The hidden states behind the last layer: ``[1, length, m]`` of each sample."""
        assert self._states is not None
        return self._states

    def go_on(self, index: int, states: list[Tensor]) -> None:
        """Go on with layer ``index``, which reads these hidden states."""
        self._states = None
        self.layers.embedded(self.tokens)  # what layers get beside them
        self._index, self._last = index - 1, None
        self._states = [x.to(self.device, copy=True) for x in states]

    def _next(self, index: int) -> Calibration:
        states, self._states = self.states, None  # which hold of two layers in the middle
        # What q_proj reads, or what it is fused into, is what its layer reads.
        first = f"layer.{self.model.family.attention}.{self.model.family.weights[0][0]}"
        try:
            with (
                self.layers.layer(index) as layer,
                side_by_side(self.device) as workers,
                _quick_products(self.device),
            ):
                found = observe(
                    layer, layer.get_submodule(first), states, workers=workers, advance=self.advance
                )
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"layer {index}, over text: {error}") from error
        give_back()
        self._states = states
        return found.to("cpu")


@contextmanager
def _quick_products(device: torch.device | str) -> Iterator[None]:
    """On a GPU, products of fp32 round their factors to 11 bits, three more than bf16 has: eight times as
    fast.

    Moments are sums in fp64, which this leaves as they are.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before if torch.device(device).type == "cpu" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
