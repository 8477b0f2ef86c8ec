"""The kernels over lists of selected keys: ``lists.py`` keeps the visible entries, ``forward.py`` attends,
and ``backward.py`` computes gradients.
"""
