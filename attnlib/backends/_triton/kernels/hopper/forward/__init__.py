"""Hopper's forward: a producer warp that loads tiles, and consumer warpgroups that multiply under each other's softmax.

``kernel.py`` and ``kernel_fp8.py`` are launched; the other files are device functions, named by their part.
"""
