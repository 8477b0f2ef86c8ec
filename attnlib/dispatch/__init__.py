"""Who runs a call: the preference list, the one route from a checked call to a backend, and what is said aloud.

``select.py`` chooses by the spec alone, ``run.py`` runs, ``storage.py`` asks a device for what caches need,
``placements.py`` takes DTensors apart, ``warnings.py`` finds calls that most likely mean something else.
"""
