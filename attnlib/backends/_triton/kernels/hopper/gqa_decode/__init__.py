"""GQA decoding on Hopper, with few query rows over pages of keys and values: a program reads all KV heads of
a token.

The entry points are ``pages.py`` and ``int8_fp8.py``, named by what the pages store.
"""
