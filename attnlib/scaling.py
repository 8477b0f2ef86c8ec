"""Rope scaling rules, under the public name ``attnlib.scaling``."""

from .rope import NTK as NTK
from .rope import DynamicNTK as DynamicNTK
from .rope import Linear as Linear
from .rope import Llama3 as Llama3
from .rope import LongRoPE as LongRoPE
from .rope import Proportional as Proportional
from .rope import Temperature as Temperature
from .rope import YaRN as YaRN
