"""Things done side by side, with results that do not depend on how many are done at once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ..calibration import ALONE, Workers


@contextmanager
def side_by_side(device: torch.device | str) -> Iterator[Workers]:
    """As many workers as torch has threads, each of which computes on one thread; on a GPU the caller alone.

    torch splits some products among its threads in ways that depend on their number and change bits (an fp32
    product of 1,000 x 24 with 1,000 x 25 on four threads; torch 2.11). On one thread there is nothing to
    split.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu":
        yield ALONE
        return
    torch.set_num_threads(1)  # which threads that start now ask for, too
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield Workers(threads, pool.map)
    finally:
        torch.set_num_threads(threads)
