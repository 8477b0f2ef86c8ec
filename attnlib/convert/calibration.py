"""Calibration: measure second moments of each layer's inputs on sample text, one layer at a time."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..internal.philox import philox
from ..internal.signatures import kind

Batch = Tensor | tuple[Tensor, Mapping[str, object]]
Block = Callable[..., Tensor]

STRIP = 512  # number of rows of the moment matrix that one worker sums at a time
# At most this many inputs are retained to measure errors on. For a layer of width 4,096 in fp32, they take
# half as much memory as the moment matrix.
SAMPLE = 4096


@kind
@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Statistics of the inputs x of one layer over ``tokens`` tokens: second moments, and a sample.

    ``moment`` ``[m + 1, m + 1]``, in fp64, is the mean C of ``y y^T`` with ``y = [x, 1]``. Queries, keys and
    values (before norms and rope) are linear in y, whose last entry multiplies their biases. Therefore C
    gives all their second moments: the moment of ``W y`` is ``W C W^T``. Other errors are measured on
    ``sample`` ``[n, m]``, a subset of the inputs in token order, or None if no inputs were retained.

    Raises:
        TypeError: ``moment`` is not fp64.
        ValueError: ``moment`` is not square or not finite, or ``sample`` has another width.
    """

    tokens: int
    moment: Tensor
    sample: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.moment, Tensor) or self.moment.dtype != torch.float64:
            got = self.moment.dtype if isinstance(self.moment, Tensor) else type(self.moment).__name__
            raise TypeError(f"moment: expected an fp64 tensor [m + 1, m + 1], got {got}")
        if self.moment.dim() != 2 or self.moment.shape[0] != self.moment.shape[1]:
            raise ValueError(f"moment: expected a square [m + 1, m + 1], got {tuple(self.moment.shape)}")
        if not self.moment.isfinite().all():
            raise ValueError("moment: expected finite numbers; some input of the layer is NaN or infinite")
        if self.sample is not None and self.sample.shape[1:] != (len(self.moment) - 1,):
            raise ValueError(
                f"sample: expected [n, {len(self.moment) - 1}], like moment, got {tuple(self.sample.shape)}"
            )

    @classmethod
    def white(cls, hidden_size: int, device: torch.device | str | None = None) -> "Calibration":
        """Return a calibration without text: uncorrelated inputs of variance 1.

        Second moments of queries, keys and values are then products of their weights.
        """
        return cls(0, torch.eye(hidden_size + 1, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, batches: Iterable[Tensor]) -> "Calibration":
        """Return the calibration of one layer from batches of its inputs ``[..., m]``, without padding.

        Every token counts, so remove padding first. The sample holds all tokens if there are at most 4,096,
        and otherwise about 2,000 to 4,096 of them. It does not depend on how the tokens are batched.

        Raises:
            ValueError: there is no token, the widths differ, or an input is NaN or infinite.

        >>> Calibration.of(torch.randn(3, 2, 5, 16)).moment.shape
        torch.Size([17, 17])
        """
        moments = _Moments()
        for batch in batches:
            moments.add(batch)
        return moments.mean()

    def to(self, device: torch.device | str) -> "Calibration":
        """Return the calibration on another device."""
        sample = None if self.sample is None else self.sample.to(device)
        return replace(self, moment=self.moment.to(device), sample=sample)

    def energy(self, rows: Tensor) -> Tensor:
        """Return the mean square ``E |W y|^2`` of the outputs of each projection ``W`` in ``rows``.

        ``rows`` is ``[..., d, m + 1]``, real or complex. The result is real ``[...]``.
        """
        return torch.einsum("...dm,...dm->...", rows @ self.moment.to(rows.dtype), rows.conj()).real

    def inputs(self) -> Tensor | None:
        """Return the sample ``[n, m + 1]`` in fp64, with a last column of ones; None without a sample."""
        return None if self.sample is None else pad(self.sample.to(self.moment), (0, 1), value=1.0)


@kind
def calibrate(blocks: Iterable[tuple[Block, nn.Module]], batches: Iterable[Batch]) -> Iterator[Calibration]:
    """Run batches of hidden states ``[..., m]`` through a model's blocks; yield each layer's calibration.

    ``blocks`` yields pairs: a block, which maps a batch to the input of the next block, and the attention
    layer inside it, whose inputs are observed. A batch is a tensor, or a pair of a tensor and keyword
    arguments for every block, such as the ``cu_seqlens`` of a packed batch. ``blocks`` is read lazily, and
    only one block and one moment matrix are needed at a time, so blocks can be loaded, converted and released
    one by one. Blocks run without gradients and in their current mode, so disable dropout first. Each block
    runs before its calibration is yielded, so converting it afterwards does not change the inputs of later
    blocks.

    Raises:
        ValueError: a block never calls its layer, or :meth:`Calibration.of` raises it for the inputs.

    >>> layers = [GroupedQueryAttention(16, 4, mask=CAUSAL) for _ in range(2)]
    >>> offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    >>> packed = torch.randn(9, 16), {"cu_seqlens": offsets}
    >>> text = [torch.randn(1, 9, 16), packed]
    >>> calibrations = calibrate(((layer, layer) for layer in layers), text)
    >>> [calibration.tokens for calibration in calibrations]
    [18, 18]
    """
    batches = list(batches)
    for block, layer in blocks:
        yield observe(block, layer, batches)


class Workers(NamedTuple):
    """A parallel map: ``map`` runs a function on ``count`` items at once and returns results in order."""

    count: int
    map: Callable[..., Iterable]


ALONE = Workers(1, map)


def observe(
    block: Block,
    layer: nn.Module,
    batches: list[Batch],
    *,
    workers: Workers = ALONE,
    advance: Callable[[], object] = lambda: None,
) -> Calibration:
    """Run all ``batches`` through one block, and return the calibration of its attention layer.

    Each entry of ``batches`` is replaced by the block's output, as the input of the next block. ``advance``
    is called after each batch. The result is bit-identical for any number of workers.
    """
    moments, seen = _Moments(), threading.local()
    hook = layer.register_forward_pre_hook(lambda _, args: seen.inputs.append(args[0]))
    try:
        for start in range(0, len(batches), workers.count):
            # At most this many batches have both their input and their output in memory.
            some = slice(start, start + workers.count)
            for n, (inputs, batch) in enumerate(
                workers.map(partial(_run_block, block, seen), batches[some]), start
            ):
                for x in inputs:
                    moments.add(x, workers)
                batches[n] = batch
                advance()
    finally:
        hook.remove()
    return moments.mean()


def _run_block(block: Block, seen: threading.local, batch: Batch) -> tuple[list[Tensor], Batch]:
    """Run one batch through a block; return the inputs of its attention layer, and the new batch.

    A hook on the layer records its inputs in ``seen``, which is local to the thread.
    """
    x, arguments = batch if isinstance(batch, tuple) else (batch, {})
    seen.inputs = []
    with torch.no_grad():
        x = block(x, **arguments)
    return seen.inputs, (x, arguments) if isinstance(batch, tuple) else x


def fitting(calibration: Calibration | None, hidden_size: int, device: torch.device) -> Calibration:
    """Move a calibration to ``device``; None becomes :meth:`Calibration.white`.

    Raises:
        ValueError: the calibration was measured on inputs whose width is not ``hidden_size``.
    """
    if calibration is None:
        return Calibration.white(hidden_size, device)
    width = len(calibration.moment) - 1
    if width != hidden_size:
        raise ValueError(f"calibration: expected inputs of width {hidden_size} like the layer's, got {width}")
    return calibration.to(device)


class _Moments:
    """The running sum of ``y y^T`` in fp64, and a sample of the inputs x."""

    def __init__(self):
        # The total is symmetric, so only its upper half is computed.
        self.tokens, self.total, self.sample = 0, None, _Sample()

    def add(self, x: Tensor, workers: Workers = ALONE) -> None:
        x = x.detach().flatten(0, -2)
        y = pad(x.double(), (0, 1), value=1.0)
        if self.total is None:
            self.total = y.new_zeros(y.shape[-1], y.shape[-1])
        if len(self.total) != y.shape[-1]:
            raise ValueError(
                f"batches: expected width {len(self.total) - 1} like the first one, got {x.shape[-1]}"
            )
        self.tokens += len(x)
        self.sample.add(x)

        def add_rows(start: int) -> None:
            self.total[start : start + STRIP, start:].addmm_(y[:, start : start + STRIP].T, y[:, start:])

        list(workers.map(add_rows, range(0, len(self.total), STRIP)))  # list() waits for all workers

    def mean(self) -> Calibration:
        if not self.tokens:
            raise ValueError("batches: expected at least one token that reaches the layer, got none")
        upper = self.total.triu_()
        return Calibration(self.tokens, (upper + upper.triu(1).T) / self.tokens, self.sample.rows())


class _Sample:
    """A random sample of at most SAMPLE rows from a stream of unknown length.

    Each row gets a random number and is retained if the number is below a threshold. The threshold is halved
    whenever there are too many rows. The number depends only on the row's position in the text, so batching
    does not change the sample. First tokens, which models treat differently, are sampled as often as they
    occur, whatever the window length.
    """

    def __init__(self):
        self._seen, self._share = 0, 1.0
        # For each batch, the random numbers of the sampled rows and the rows themselves.
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor) -> None:
        places = torch.arange(self._seen, self._seen + len(x), device=x.device)
        numbers = philox((places, *3 * [torch.zeros_like(places)]), (0, 0))[0] / 2**32
        self._seen += len(x)
        self._parts.append(self._retained(numbers, x))
        while sum(len(rows) for _, rows in self._parts) > SAMPLE:
            self._share /= 2
            self._parts = [self._retained(*part) for part in self._parts]

    def rows(self) -> Tensor:
        return torch.cat([rows for _, rows in self._parts])

    def _retained(self, numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        is_retained = numbers < self._share
        return numbers[is_retained], rows[is_retained]
