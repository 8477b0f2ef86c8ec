"""Rotary position embeddings.

``rope.py`` defines Rope, the description of an embedding that layers store. ``scaling.py`` holds the
published rules for longer contexts, and ``rotation.py`` rotates heads by angles. ``selected.py`` builds a
rope from selected channel pairs of another rope, for checkpoint conversion.
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
