"""Device functions: programs of indices as Triton source, which kernels take as constexpr arguments and
inline.

``sources.py`` writes one line of source for each step of a program, in int32 if ``ranges.py`` shows that it
suffices.
"""
