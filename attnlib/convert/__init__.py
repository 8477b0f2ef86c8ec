"""Trained layers of one kind into layers of another: MHA to GQA, GQA to fewer groups, GQA to MLA.

``mha_to_gqa`` and ``gqa_to_mla`` make new layers of layers. They are thin: the same functions on plain weights are
``weights.split``, what ``heads`` and ``align`` do with its Heads, ``embedding`` and ``truncation``, and each ``join``.
"""

from .calibration import Calibration, calibrate
from .heads import fold, mha_to_gqa
from .latent import gqa_to_mla
from .mixed import MixedLinear

__all__ = ["Calibration", "MixedLinear", "calibrate", "fold", "gqa_to_mla", "mha_to_gqa"]
