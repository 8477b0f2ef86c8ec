"""MLA decoding on Hopper, over latents of 512 + 64 channels; all query heads share the loaded tiles.

``kernel.py`` is the entry point. It runs ``rows_16.py``, ``rows_64.py`` or ``rows_16_int8_fp8.py``, which are
named after the number of query rows in a tile and the dtype of the cache.
"""
