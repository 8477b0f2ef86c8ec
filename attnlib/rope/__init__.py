"""Rotary position embeddings.

``rope.py`` defines Rope, the description of an embedding that layers store. ``scaling.py`` holds the
published rules for longer contexts, ``axes.py`` the ropes of several axes, ``mrope.py`` counts their
positions, and ``rotation.py`` rotates heads by angles. ``selected.py`` builds a rope from selected channel
pairs of another rope, for checkpoint conversion.
"""

from .axes import Axes
from .mrope import mrope_positions
from .rope import Rope, yarn_ramp
from .rotation import Angles, check_rotation, rotate
from .scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    QueryTemperature,
    YaRNScaling,
    scaling_of,
)
from .selected import select

__all__ = [
    "Angles",
    "Axes",
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "NTKScaling",
    "ProportionalScaling",
    "QueryTemperature",
    "Rope",
    "YaRNScaling",
    "check_rotation",
    "mrope_positions",
    "rotate",
    "scaling_of",
    "select",
    "yarn_ramp",
]
