"""MLA decoding on Hopper, over latents of 512 + 64 channels; all query heads share the loaded tiles.

``kernel.py`` is the entry point. It runs ``rows_16.py``, ``rows_64.py`` or ``rows_16_int8_fp8.py``, named by
query rows and cache dtype.
"""
