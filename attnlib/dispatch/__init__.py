"""Dispatch: choose a backend for a spec, run the call on it, and warn about slow or suspicious calls.

``select.py`` chooses, ``run.py`` runs, ``storage.py`` writes tokens to a cache and plans how to read it,
``placements.py`` handles DTensors, and ``warnings.py`` detects calls that probably mean something else.
"""
