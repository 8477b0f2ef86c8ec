"""Default amount of text for a comparison: about one minute of work, at most eight windows."""

import math

import torch

from ...checkpoint_files.folder import Checkpoint
from ..text.held_out import LENGTH, WINDOWS

# Work budget in floating-point operations; a comparison takes 4 per weight and token (two models, one
# multiply-add each). Measured speeds (2026-11):
#   two cores, idle server    2e11 per second
#   two cores, busy server    6e10 per second
#   H100                      reading dominates, 57 s for 2 x 16 GB
CPU_WORK, GPU_WORK = 4e12, 3e14


def windows_for(checkpoint: Checkpoint, device: torch.device | str) -> int:
    """Return the number of held-out windows to compare this checkpoint on; 0 if it is too large."""
    weights = sum(math.prod(stored.entry.shape) for stored in checkpoint.tensors.values())
    work = CPU_WORK if torch.device(device).type == "cpu" else GPU_WORK
    return min(WINDOWS, int(work / (4 * weights * LENGTH)))
