"""How a function of indices becomes a program: steps that kernels inline and backends differentiate.

``trace.py`` calls the function once, with stand-ins. ``program.py`` is the text that results, ``evaluation.py`` runs it
on torch's tensors, and ``derivative.py`` differentiates it. A new operation for users belongs in ``kinds.py``,
``tracer.py``, ``evaluation.py``, ``derivative.py``, and in the programs of each backend.
"""
