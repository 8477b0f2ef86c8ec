"""Hopper's forward: a producer warp loads tiles; consumer warpgroups overlap softmax with matrix products.

``kernel.py`` is the entry point. The other files are device functions, named by their part.
"""
