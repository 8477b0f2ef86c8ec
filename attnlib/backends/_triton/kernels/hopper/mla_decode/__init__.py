"""MLA decoding on Hopper, over latents of 512 + 64 channels: all query heads share what is loaded.

The entry points are ``rows_16.py``, ``rows_64.py`` and ``rows_16_int8_fp8.py``, named by query rows and
storage.
"""
