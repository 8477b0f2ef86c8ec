"""The Hopper forward: a producer warp loads tiles, consumer warpgroups overlap softmax with matrix products.

``kernel.py`` is the entry point. The other files hold its device functions, except ``transpose_values.py``, a
kernel that runs before it if the inputs are fp8.
"""
