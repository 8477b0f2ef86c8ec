"""Dispatch: choose a backend for a spec, run the call on it, and warn about slow or suspicious calls.

``select.py`` chooses, ``run.py`` runs, ``storage.py`` does the cache's work on a device, ``placements.py``
handles DTensors, and ``warnings.py`` detects calls that probably mean something else.
"""
