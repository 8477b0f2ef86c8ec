"""Checkpoint folders read and written, safe against crashes and strangers, whatever converts the layers in them."""

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
