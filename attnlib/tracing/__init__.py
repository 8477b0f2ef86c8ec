"""Tracing: turn a function of indices into a program, a list of steps that kernels inline and backends
differentiate.

``trace.py`` calls the function once, with stand-ins. ``program.py`` is the resulting text, ``evaluation.py``
runs it on torch tensors, and ``derivative.py`` differentiates it. A new operation for users goes into
``kinds.py``, ``tracer.py``, ``evaluation.py``, ``derivative.py``, and into the programs of each backend.
"""
