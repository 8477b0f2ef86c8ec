"""Translate mask and score functions into Triton functions, which kernels inline.

A traced function is a program, a list of steps. ``sources.py`` writes a line of Triton source for each step.
It uses int32 if ``ranges.py`` shows that int32 cannot overflow, otherwise int64.
"""
