"""Decoding few rows of queries over pages of keys and values, on Hopper: each program reads all KV heads of a token.

``pages.py`` and ``int8_fp8.py`` are launched, by what is stored.
"""
