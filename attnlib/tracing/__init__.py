"""Tracing: convert a mask or score function into a program, which kernels inline and backends differentiate.

A program is a list of steps. ``trace.py`` calls the function once, with placeholders for its arguments
(stand-ins). ``program.py`` holds the resulting text, ``evaluation.py`` runs it on torch tensors, and
``derivative.py`` differentiates it. To support another operation in users' functions, extend ``kinds.py``,
``tracer.py``, ``evaluation.py``, ``derivative.py``, and the code of each backend that runs programs.
``score_options.py`` finds softcap and ALiBi in score functions, by the polynomials of ``polynomials.py``.
"""
