"""Tracing: convert a function of indices into a program that kernels inline and backends differentiate.

A program is a list of steps. ``trace.py`` calls the function once, with stand-ins for its arguments.
``program.py`` holds the resulting text, ``evaluation.py`` runs it on torch tensors, and ``derivative.py``
differentiates it. To add an operation for users, extend ``kinds.py``, ``tracer.py``, ``evaluation.py``,
``derivative.py``, and the code of each backend that runs programs.
"""
