"""Attention over a cache, and what writes to one: from the operator by shapes and a plan to launches.

``operators.py`` is what torch calls, ``shapes.py`` what follows from layouts, ``tables.py`` the tiles of each chip,
``schedule.py`` how a step's sequences are shared out. ``peers.py`` writes into the memory of other GPUs.
"""
