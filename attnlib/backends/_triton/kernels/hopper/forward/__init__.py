"""The Hopper forward: a producer warp loads tiles, and consumer warpgroups compute attention.

``kernel.py`` and ``kernel_fp8.py`` are the entry points. The other files hold their device functions, except
``transpose_values.py``, a kernel that runs before ``kernel_fp8.py``.
"""
