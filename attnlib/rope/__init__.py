"""Rotary position embeddings: what angles a pair of channels turns by, and the rotation.

``rope.py`` is the description that layers hold, ``scaling.py`` the published rules that stretch it to longer contexts,
``rotation.py`` the angles computed and applied, ``selected.py`` a rope of chosen pairs, which conversion makes.
"""

from .rope import Rope, yarn_ramp
from .rotation import Angles, check_rotation, rotate
from .scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Temperature, YaRN, scaling_of
from .selected import select

__all__ = [
    "NTK",
    "Angles",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Proportional",
    "Rope",
    "Temperature",
    "YaRN",
    "check_rotation",
    "rotate",
    "scaling_of",
    "select",
    "yarn_ramp",
]
