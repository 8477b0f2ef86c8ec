"""Attention over a KV cache, and writes to the cache.

``operators.py`` is called by torch, ``shapes.py`` derives sizes and strides from layouts, ``tables.py``
chooses tiles, ``schedule.py`` splits sequences across the GPU, and ``peers.py`` writes into the memory of
other GPUs.
"""
