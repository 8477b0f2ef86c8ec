"""The rules that scale a rope, under the name that they have always been imported by: ``attnlib.scaling``."""

from .rope import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Temperature, YaRN

__all__ = ["NTK", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "Proportional", "Temperature", "YaRN"]
