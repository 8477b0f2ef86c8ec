"""Rotary position embeddings.

``rope.py`` holds the description that layers store, ``scaling.py`` the published rules for longer contexts,
and ``rotation.py`` the angles and the rotation. ``selected.py`` builds a rope from selected pairs of another
one, for checkpoint conversion.
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
