"""Attention over a KV cache, and writes to the cache.

``operators.py`` defines the torch operator, ``shapes.py`` derives launch arguments from tensor shapes,
``tables.py`` chooses tiles, ``schedule.py`` splits sequences across the GPU, and ``peers.py`` writes into the
memory of other GPUs.
"""
