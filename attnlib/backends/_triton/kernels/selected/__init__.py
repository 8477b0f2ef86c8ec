"""The kernels over lists of selected keys.

``lists.py`` sorts the visible entries, ``forward.py`` attends to tensors, and ``decode.py`` to a cache.
"""
