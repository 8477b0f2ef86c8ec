"""Checkpoint folders as strangers wrote them: read here and nowhere else, by whoever converts, loads or
trains.

A folder is a config.json and files of safetensors. ``folder`` opens only plain files directly in it and reads
all but the tensors, ``header`` and ``plain_json`` parse, ``config`` refuses what a config.json must not ask
for, and ``finite`` counts what is not a number. Sizes are bounded before anything is allocated.
"""

from .errors import CheckpointError
from .folder import Checkpoint, SourceFile, StoredTensor, read_folder

__all__ = ["Checkpoint", "CheckpointError", "SourceFile", "StoredTensor", "read_folder"]
