"""Checkpoint folders read and written, safe against crashes and strangers, whatever converts the layers in
them.
"""

import sys

from ...checkpoint_files import folder, header, plain_json
from .conversion import convert
from .errors import CheckpointError, NoSpaceError, OutputError, RequestError, VerificationError
from .layer import ConvertedLayer, LayerConverter, LayerShape, identity

__all__ = [
    "CheckpointError",
    "ConvertedLayer",
    "LayerConverter",
    "LayerShape",
    "NoSpaceError",
    "OutputError",
    "RequestError",
    "VerificationError",
    "convert",
    "identity",
]

for _moved in (folder, header, plain_json):  # which others import from here as well
    sys.modules[f"{__name__}.{_moved.__name__.rpartition('.')[2]}"] = _moved
