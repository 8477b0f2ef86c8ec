"""Run functions in parallel, with results that do not depend on the number of threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ..calibration import ALONE, Workers


@contextmanager
def side_by_side(device: torch.device | str) -> Iterator[Workers]:
    """Yield a pool with one worker per torch thread; on a GPU, only the calling thread works.

    torch splits some products between its threads, and the result then depends on their number (torch 2.11:
    an fp32 product of 1,000 x 24 with 1,000 x 25 on four threads). So each worker lets torch use only one
    thread.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu":
        yield ALONE
        return
    torch.set_num_threads(1)  # new threads inherit this setting
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield Workers(threads, pool.map)
    finally:
        torch.set_num_threads(threads)
