"""Trained layers of one kind into layers of another: MHA to GQA, GQA to fewer groups, GQA to MLA.

``mha_to_gqa``, ``gqa_to_mla`` and ``gqa_to_deepseek`` make new layers of layers. They are thin: the same functions on
plain weights are ``weights.split``, what ``heads`` and ``align`` do with its Heads, ``embedding``, ``truncation``, and
each ``join``. Whole checkpoints are converted by ``python -m attnlib convert``, which is ``checkpoint.convert`` with a
converter of ``converters`` or ``deepseek``.
"""

from .calibration import Calibration, calibrate
from .checkpoint import CheckpointError, NoSpaceError, OutputError, RequestError, VerificationError
from .deepseek_layer import gqa_to_deepseek
from .heads import fold, mha_to_gqa
from .latent import gqa_to_mla
from .mixed import MixedLinear

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
