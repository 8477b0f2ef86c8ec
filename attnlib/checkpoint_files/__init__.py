"""The only reader of untrusted checkpoint folders, for conversion, loading and training.

A checkpoint folder holds a config.json and safetensors files. ``folder`` opens only plain files directly in
the folder and reads everything but the tensors. ``header`` and ``plain_json`` parse file headers and JSON,
``config`` rejects a dangerous config.json, and ``finite`` counts NaN and infinities. Sizes are checked before
memory is allocated.
"""

from .errors import CheckpointError
from .folder import Checkpoint, SourceFile, StoredTensor, read_folder

__all__ = ["Checkpoint", "CheckpointError", "SourceFile", "StoredTensor", "read_folder"]
