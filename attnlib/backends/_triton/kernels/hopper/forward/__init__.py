"""The Hopper forward: a producer warp loads tiles, consumer warpgroups overlap softmax with matrix products.

``kernel.py`` and ``kernel_fp8.py`` are the entry points. The other files are device functions, named by their
part.
"""
