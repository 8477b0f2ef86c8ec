"""Attention without a cache, dense or packed: from the operator by shapes and a plan to launches.

``operators.py`` is what torch calls, ``shapes.py`` what follows from layouts, ``generic.py`` and ``hopper.py`` the
plans, ``tables.py`` and ``hopper_tables.py`` the tiles of each chip. A faster tile is an entry of a table.
"""
