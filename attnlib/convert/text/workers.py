"""Parallel execution with results that do not depend on the number of threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ..calibration import ALONE, Workers


@contextmanager
def side_by_side(device: torch.device | str) -> Iterator[Workers]:
    """Yield one worker per torch thread, each computing on a single thread; on a GPU, only the caller works.

    torch splits some products among its threads, in ways that depend on the thread count and change bits (an
    fp32 product of 1,000 x 24 with 1,000 x 25 on four threads; torch 2.11). A single thread has nothing to
    split.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu":
        yield ALONE
        return
    torch.set_num_threads(1)  # threads started from now on inherit this
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield Workers(threads, pool.map)
    finally:
        torch.set_num_threads(threads)
