"""Choose how much text to compare two models on: about a minute of work, at most eight windows of tokens."""

import math

import torch

from ...checkpoint_files.folder import Checkpoint
from ..text.held_out import LENGTH, WINDOWS

# The largest number of floating-point operations to spend on a comparison, which needs 4 per weight and
# token: a multiplication and an addition in each of the two models. Measured speeds (2026-11):
#   two cores, idle server    2e11 operations per second
#   two cores, busy server    6e10 operations per second
#   H100                      57 s for two models of 16 GB, mostly for reading the files
CPU_WORK, GPU_WORK = 4e12, 3e14


def windows_for(checkpoint: Checkpoint, device: torch.device | str) -> int:
    """Return how many windows of held-out text to compare this checkpoint on; 0 if it is too large."""
    weights = sum(math.prod(stored.entry.shape) for stored in checkpoint.tensors.values())
    work = CPU_WORK if torch.device(device).type == "cpu" else GPU_WORK
    return min(WINDOWS, int(work / (4 * weights * LENGTH)))
