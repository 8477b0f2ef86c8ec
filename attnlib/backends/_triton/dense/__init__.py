"""Dense and packed attention, without a KV cache.

``operators.py`` is called by torch, ``shapes.py`` derives sizes and strides from layouts, ``generic.py`` and
``hopper.py`` plan the launches, and ``tables.py`` and ``hopper_tables.py`` choose tiles. To add a faster
tile, add a table entry.
"""
