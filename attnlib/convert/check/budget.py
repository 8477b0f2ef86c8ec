"""How much text a comparison reads where nobody says: as much as takes about a minute, up to eight
windows.
"""

import math

import torch

from ...checkpoint_files.folder import Checkpoint
from ..text.held_out import LENGTH, WINDOWS

# Two models, a product and a sum of each weight for each token: 2e11 a second on two cores of a server that
# does nothing else, 6e10 on one that does; on an H100 reading takes most of the time, 57 s for 2 x 16 GB
# (2026-11).
CPU_WORK, GPU_WORK = 4e12, 3e14


def windows_for(checkpoint: Checkpoint, device: torch.device | str) -> int:
    """Windows of held-out text to compare a conversion of this checkpoint on; 0: it is too large for that."""
    weights = sum(math.prod(stored.entry.shape) for stored in checkpoint.tensors.values())
    work = CPU_WORK if torch.device(device).type == "cpu" else GPU_WORK
    return min(WINDOWS, int(work / (4 * weights * LENGTH)))
