"""What a conversion knows of a layer's inputs: their second moments over text, one layer at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The mean of ``y y^T`` over ``tokens`` inputs x of one layer, with ``y = [x, 1]``: fp64 ``[m + 1, m + 1]``.

    Queries, keys and values (before norms and rope) are linear in y, whose last entry carries their biases, so that
    this one matrix C gives the second moments of all of them: those of ``W y`` are ``W C W^T``.

    Raises:
        TypeError: ``moment`` is not fp64.
        ValueError: ``moment`` is not square or not finite.
    """

    tokens: int
    moment: Tensor

    def __post_init__(self):
        if not isinstance(self.moment, Tensor) or self.moment.dtype != torch.float64:
            got = self.moment.dtype if isinstance(self.moment, Tensor) else type(self.moment).__name__
            raise TypeError(f"moment: expected an fp64 tensor [m + 1, m + 1], got {got}")
        if self.moment.dim() != 2 or self.moment.shape[0] != self.moment.shape[1]:
            raise ValueError(f"moment: expected a square [m + 1, m + 1], got {tuple(self.moment.shape)}")
        if not self.moment.isfinite().all():
            raise ValueError("moment: expected finite numbers; some input of the layer is NaN or infinite")

    @classmethod
    def white(cls, hidden_size: int, device: torch.device | str | None = None) -> "Calibration":
        """No text: uncorrelated inputs of variance 1, so that moments of activations are products of weights."""
        return cls(0, torch.eye(hidden_size + 1, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, batches: Iterable[Tensor]) -> "Calibration":
        """Over inputs ``[..., m]`` of one layer, a batch at a time; every token counts, so leave padding out.

        Raises:
            ValueError: no token, widths that differ, or a NaN.

        >>> Calibration.of(torch.randn(3, 2, 5, 16)).moment.shape
        torch.Size([17, 17])
        """
        moments = _Moments()
        for batch in batches:
            moments.add(batch)
        return moments.mean()

    def energy(self, rows: Tensor) -> Tensor:
        """The mean square ``E |W y|^2`` of each ``W`` in real or complex ``[..., d, m + 1]``: real ``[...]``."""
        return torch.einsum("...dm,...dm->...", rows @ self.moment.to(rows.dtype), rows.conj()).real


def calibrate(
    blocks: Iterable[tuple[Callable[[Tensor], Tensor], nn.Module]], batches: Iterable[Tensor]
) -> Iterator[Calibration]:
    """The calibration of one layer after another, as hidden states ``[..., m]`` move through a model's blocks.

    ``blocks`` are pairs of a block, called with each batch to give the next block's, and the attention layer inside it,
    whose inputs are observed. Only one block and one layer's moments are needed at a time: both iterators are lazy, so
    that blocks may be loaded, converted and released one by one. Blocks are called without gradients, in the mode they
    are in (dropout belongs switched off), and always as they were before what is done with their calibration.

    Raises:
        ValueError: a block that never calls its layer, or inputs as :meth:`Calibration.of` refuses them.

    >>> layers = [GroupedQueryAttention(16, 4, mask=CAUSAL) for _ in range(2)]
    >>> text = [torch.randn(1, 9, 16), torch.randn(1, 4, 16)]
    >>> [calibration.tokens for calibration in calibrate(((layer, layer) for layer in layers), text)]
    [13, 13]
    """
    batches = list(batches)
    for block, layer in blocks:
        moments = _Moments()
        hook = layer.register_forward_pre_hook(lambda _, args, moments=moments: moments.add(args[0]))
        try:
            with torch.no_grad():
                for n, x in enumerate(batches):
                    batches[n] = block(x)  # one after another, so that none is in memory twice
        finally:
            hook.remove()
        yield moments.mean()


def fitting(calibration: Calibration | None, hidden_size: int, device: torch.device) -> Calibration:
    """The calibration on this device, white if there is none.

    Raises:
        ValueError: a calibration of inputs of another width.
    """
    if calibration is None:
        return Calibration.white(hidden_size, device)
    width = len(calibration.moment) - 1
    if width != hidden_size:
        raise ValueError(f"calibration: expected inputs of width {hidden_size} like the layer's, got {width}")
    return Calibration(calibration.tokens, calibration.moment.to(device))


class _Moments:
    """A sum of ``y y^T`` in fp64."""

    def __init__(self):
        self.tokens, self.total = 0, None

    def add(self, x: Tensor) -> None:
        x = x.detach().flatten(0, -2).double()
        y = torch.cat((x, x.new_ones(len(x), 1)), -1)
        if self.total is not None and len(self.total) != y.shape[-1]:
            raise ValueError(f"batches: expected width {len(self.total) - 1} like the first one, got {x.shape[-1]}")
        self.tokens += len(x)
        self.total = y.T @ y if self.total is None else self.total.addmm_(y.T, y)

    def mean(self) -> Calibration:
        if not self.tokens:
            raise ValueError("batches: expected at least one token that reaches the layer, got none")
        return Calibration(self.tokens, self.total / self.tokens)
