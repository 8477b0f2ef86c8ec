"""Trained layers of one kind into layers of another: MHA to GQA, GQA to fewer groups, GQA to MLA.

``mha_to_gqa``, ``gqa_to_mla`` and ``gqa_to_deepseek`` make new layers of layers. They are thin: the same
functions on plain weights are ``weights.split``, what ``heads`` and ``latent`` do with its Heads, and each
``join``. Whole checkpoints are converted by ``python -m attnlib convert``, which is ``checkpoint.convert``
with a converter of ``heads.converter`` or ``latent.deepseek``.
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
