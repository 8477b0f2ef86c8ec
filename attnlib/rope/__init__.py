"""Rotary position embeddings.

``rope.py`` is the description that layers hold, ``scaling.py`` the published rules for longer contexts,
``rotation.py`` computes and applies angles, and ``selected.py`` makes a rope of chosen pairs of another one,
for conversion.
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
