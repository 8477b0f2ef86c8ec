"""Kernels with their arguments, launched: through Triton once, and directly from then on.

The only room that knows private parts of Triton; each is tried before it is taken (``direct.py``). What is launched
is a record (``launch.py``), which the rooms dense and decode compute.
"""
