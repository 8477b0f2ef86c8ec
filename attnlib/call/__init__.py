"""A call of attention as one value: what was asked, checked once, and what of it decides who can run it.

``call.py`` is the value, ``spec.py`` the problem without its lengths, ``functions.py`` what functions of indices add,
``cache.py`` what calls that come again have prepared. An option of attention gets its field in the first two.
"""
