"""Convert checkpoint folders with any layer converter; crashes and untrusted files do no harm."""

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

for _moved in (folder, header, plain_json):  # old code may import them from this package
    sys.modules[f"{__name__}.{_moved.__name__.rpartition('.')[2]}"] = _moved
