"""The kernels over lists of selected keys.

``lists.py`` sorts the visible entries, ``forward.py`` attends to tensors, ``decode.py`` to a cache, and
``backward.py`` computes gradients.
"""
