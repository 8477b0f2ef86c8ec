"""Decoding over MLA's latents of 512 + 64 channels, on Hopper: all query heads share what is loaded.

``rows_16.py``, ``rows_64.py`` and ``rows_16_int8_fp8.py`` are launched, by rows of queries and by what is stored.
"""
