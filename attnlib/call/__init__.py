"""An attention call as one value: validated once, and described by a spec that decides which backend runs it.

``call.py`` has the value, ``spec.py`` its description without lengths, ``functions.py`` the mask and score
functions, and ``cache.py`` the call cache. To add an option of attention, add a field in ``call.py`` and in
``spec.py``.
"""
