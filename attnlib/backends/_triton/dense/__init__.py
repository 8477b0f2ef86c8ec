"""Dense and packed attention, without a KV cache.

``operators.py`` defines the torch operators, ``shapes.py`` derives launch arguments from tensor shapes,
``generic.py`` and ``hopper.py`` plan the launches, and ``tables.py`` and ``hopper_tables.py`` choose tiles.
To add a faster tile, add an entry to one of the tables.
"""
