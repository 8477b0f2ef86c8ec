"""An attention call as one value: validated once, and described by a spec that decides which backend runs it.

``call.py`` is the value, ``spec.py`` the problem without its lengths, ``functions.py`` the functions of
indices, and ``cache.py`` the call cache. A new option of attention gets its field in ``call.py`` and
``spec.py``.
"""
