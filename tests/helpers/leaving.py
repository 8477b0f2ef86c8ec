"""How a process of a test ends that has met others."""

import gc

from torch.distributed import destroy_process_group


def leave() -> None:
    """Leave the others, and gloo's threads, on which a process aborts that ends before they do: cycles keep
    them.
    """
    destroy_process_group()
    gc.collect()
