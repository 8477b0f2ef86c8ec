"""Hopper's backward: one pass of five products, whose programs own keys and add to dq.

``kernel.py`` is launched. Its consumers are named by the widest head that they serve: ``upto_128``, ``upto_192`` and
``upto_256``.
"""
