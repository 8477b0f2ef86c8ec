"""Convert trained attention: MHA to GQA, GQA to fewer KV heads, GQA to MLA.

``mha_to_gqa``, ``gqa_to_mla`` and ``gqa_to_deepseek`` convert a layer into a new layer. They are thin
wrappers: ``weights.split`` turns a state dict into heads, a function in ``heads`` or ``latent`` converts the
heads, and a ``join`` function returns a state dict. ``python -m attnlib convert`` converts whole checkpoints:
it calls ``checkpoint.convert`` with a layer converter from ``heads.converter``, ``latent.deepseek`` or
``own``.
"""

from .calibration import Calibration, calibrate
from .checkpoint import CheckpointError, NoSpaceError, OutputError, RequestError, VerificationError
from .heads.layers import fold, mha_to_gqa
from .heads.mixed import MixedLinear
from .latent.deepseek_layer import gqa_to_deepseek
from .latent.layers import gqa_to_mla

__all__ = [
    "Calibration",
    "CheckpointError",
    "MixedLinear",
    "NoSpaceError",
    "OutputError",
    "RequestError",
    "VerificationError",
    "calibrate",
    "fold",
    "gqa_to_deepseek",
    "gqa_to_mla",
    "mha_to_gqa",
]
