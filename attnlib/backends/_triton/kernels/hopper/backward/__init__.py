"""Hopper's backward: one pass of five products, in which programs own keys and add to dq.

``kernel.py`` is the entry point. Its consumers are named by the widest head they serve: ``upto_128``,
``upto_192``, ``upto_256``.
"""
