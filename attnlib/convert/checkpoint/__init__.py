"""Read and write checkpoint folders: robust against crashes and untrusted files, for any layer converter."""

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

for _moved in (folder, header, plain_json):  # still importable under their former names in this package
    sys.modules[f"{__name__}.{_moved.__name__.rpartition('.')[2]}"] = _moved
