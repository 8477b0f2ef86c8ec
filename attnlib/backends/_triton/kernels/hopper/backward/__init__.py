"""The Hopper backward: one pass with five matrix products; each program owns a block of keys and adds to dq.

``kernel.py`` is the entry point. The consumer files ``upto_128``, ``upto_192`` and ``upto_256`` are named
after the largest head dimension that they serve.
"""
