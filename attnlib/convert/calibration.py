"""What a conversion knows of a layer's inputs: their second moments over text, one layer at a time."""

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

STRIP = 512  # rows of a moment that one worker sums
SAMPLE = 4096  # inputs kept to measure on: of a layer as wide, in fp32, half of what its moment takes


@kind
@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The mean of ``y y^T`` over ``tokens`` inputs x of one layer, with ``y = [x, 1]``: fp64 ``[m + 1, m +
    1]``.

    Queries, keys and values (before norms and rope) are linear in y, whose last entry carries their biases,
    so that this one matrix C gives the second moments of all of them: those of ``W y`` are ``W C W^T``. What
    second moments do not tell is measured on ``sample`` ``[n, m]``, some of the x in the order of the text;
    None if nobody kept any.

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
            wanted = f"[n, {len(self.moment) - 1}]"
            raise ValueError(f"sample: expected {wanted}, like moment, got {tuple(self.sample.shape)}")

    @classmethod
    def white(cls, hidden_size: int, device: torch.device | str | None = None) -> "Calibration":
        """No text: uncorrelated inputs of variance 1, so that moments of activations are products of
        weights.
        """
        return cls(0, torch.eye(hidden_size + 1, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, batches: Iterable[Tensor]) -> "Calibration":
        """Over inputs ``[..., m]`` of one layer, a batch at a time; every token counts, so leave padding out.

        The sample is of all tokens up to 4,096, and of some 2,000 to 4,096 of more, the same however they are
        batched.

        Raises:
            ValueError: no token, widths that differ, or a NaN.

        >>> Calibration.of(torch.randn(3, 2, 5, 16)).moment.shape
        torch.Size([17, 17])
        """
        moments = _Moments()
        for batch in batches:
            moments.add(batch)
        return moments.mean()

    def to(self, device: torch.device | str) -> "Calibration":
        """The same on another device."""
        sample = None if self.sample is None else self.sample.to(device)
        return replace(self, moment=self.moment.to(device), sample=sample)

    def energy(self, rows: Tensor) -> Tensor:
        """The mean square ``E |W y|^2`` of each ``W`` in real or complex ``[..., d, m + 1]``: real
        ``[...]``.
        """
        return torch.einsum("...dm,...dm->...", rows @ self.moment.to(rows.dtype), rows.conj()).real

    def inputs(self) -> Tensor | None:
        """The sample as inputs y ``[n, m + 1]``, fp64, to measure on; None without one."""
        return None if self.sample is None else pad(self.sample.to(self.moment), (0, 1), value=1.0)


@kind
def calibrate(blocks: Iterable[tuple[Block, nn.Module]], batches: Iterable[Batch]) -> Iterator[Calibration]:
    """The calibration of one layer after another, as hidden states ``[..., m]`` move through a model's
    blocks.

    ``blocks`` are pairs of a block, called with each batch to give the next block's, and the attention layer
    inside it, whose inputs are observed. A batch is a tensor, or a pair of one and keyword arguments that
    every block gets with it, such as the ``cu_seqlens`` of a packed batch. Only one block and one layer's
    moments are needed at a time: both iterators are lazy, so that blocks may be loaded, converted and
    released one by one. Blocks are called without gradients, in the mode they are in (dropout belongs
    switched off), and always as they were before what is done with their calibration.

    Raises:
        ValueError: a block that never calls its layer, or inputs as :meth:`Calibration.of` refuses them.

    >>> layers = [GroupedQueryAttention(16, 4, mask=CAUSAL) for _ in range(2)]
    >>> packed = torch.randn(9, 16), {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)}
    >>> text = [torch.randn(1, 9, 16), packed]
    >>> [calibration.tokens for calibration in calibrate(((layer, layer) for layer in layers), text)]
    [18, 18]
    """
    batches = list(batches)
    for block, layer in blocks:
        yield observe(block, layer, batches)


class Workers(NamedTuple):
    """``map`` calls a function for each of some things, ``count`` of them side by side; results keep their
    order.
    """

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
    """One step of :func:`calibrate`; ``batches`` become the next block's, and ``advance`` is told of each.

    The same bits for any number of workers.
    """
    moments, seen = _Moments(), _Seen()
    hook = layer.register_forward_pre_hook(lambda _, args: seen.inputs.append(args[0]))
    try:
        for start in range(0, len(batches), workers.count):
            some = slice(start, start + workers.count)  # so that few are in memory twice
            for n, (inputs, batch) in enumerate(
                workers.map(partial(_moved, block, seen), batches[some]), start
            ):
                for x in inputs:
                    moments.add(x, workers)
                batches[n] = batch
                advance()
    finally:
        hook.remove()
    return moments.mean()


class _Seen(threading.local):
    """What a layer's hook saw in this thread."""

    def __init__(self):
        self.inputs: list[Tensor] = []


def _moved(block: Block, seen: _Seen, batch: Batch) -> tuple[list[Tensor], Batch]:
    """What the block's layer saw of a batch, and the batch behind the block."""
    x, arguments = batch if isinstance(batch, tuple) else (batch, {})
    seen.inputs = []
    with torch.no_grad():
        x = block(x, **arguments)
    return seen.inputs, (x, arguments) if isinstance(batch, tuple) else x


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
    return calibration.to(device)


class _Moments:
    """A sum of ``y y^T`` in fp64, and a sample of the x."""

    def __init__(self):
        self.tokens, self.total, self.sample = (
            0,
            None,
            _Sample(),
        )  # of the symmetric total the upper half is summed

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

        for _ in workers.map(add_rows, range(0, len(self.total), STRIP)):
            pass

    def mean(self) -> Calibration:
        if not self.tokens:
            raise ValueError("batches: expected at least one token that reaches the layer, got none")
        upper = self.total.triu_()
        return Calibration(self.tokens, (upper + upper.triu(1).T) / self.tokens, self.sample.rows())


class _Sample:
    """At most SAMPLE of all rows: those whose random number is below a share, which is halved when needed.

    The number is a function of the row's place in the text alone: the same rows are kept however they come in
    batches, and first tokens, which models treat unlike others, are met as often as they occur whatever the
    pieces' length.
    """

    def __init__(self):
        self._seen, self._share = 0, 1.0
        self._parts: list[tuple[Tensor, Tensor]] = []  # numbers and rows of each batch

    def add(self, x: Tensor) -> None:
        places = torch.arange(self._seen, self._seen + len(x), device=x.device)
        numbers = philox((places, *3 * [torch.zeros_like(places)]), (0, 0))[0] / 2**32
        self._seen += len(x)
        self._parts.append(self._kept(numbers, x))
        while sum(len(rows) for _, rows in self._parts) > SAMPLE:
            self._share /= 2
            self._parts = [self._kept(*part) for part in self._parts]

    def rows(self) -> Tensor:
        return torch.cat([rows for _, rows in self._parts])

    def _kept(self, numbers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        kept = numbers < self._share
        return numbers[kept], rows[kept]
