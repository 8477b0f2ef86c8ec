"""Device functions: mask and score programs as Triton source, passed to kernels as constexpr and inlined.

``sources.py`` writes one line of source for each step of a program. It uses int32 if ``ranges.py`` shows that
int32 cannot overflow.
"""
