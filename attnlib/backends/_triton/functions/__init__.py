"""Programs of indices as device functions, which kernels take as constexpr arguments and inline.

``sources.py`` writes a line of Triton for each step of a program, in int32 where ``ranges.py`` shows that it suffices.
"""
