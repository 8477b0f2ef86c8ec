"""Rope scaling rules, under the public name ``attnlib.scaling``."""

from types import MappingProxyType
from typing import TYPE_CHECKING

from .internal.renamed import module_getattr
from .rope import DynamicNTKScaling as DynamicNTKScaling
from .rope import LinearScaling as LinearScaling
from .rope import Llama3Scaling as Llama3Scaling
from .rope import LongRoPEScaling as LongRoPEScaling
from .rope import NTKScaling as NTKScaling
from .rope import ProportionalScaling as ProportionalScaling
from .rope import YaRNScaling as YaRNScaling

_RULES = ("DynamicNTK", "Linear", "Llama3", "LongRoPE", "NTK", "Proportional", "YaRN")
RENAMED = MappingProxyType({name: f"{name}Scaling" for name in _RULES})

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, RENAMED)
