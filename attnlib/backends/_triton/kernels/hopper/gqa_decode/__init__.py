"""GQA decoding on Hopper, with few query rows over pages of keys and values: a program reads all KV heads of
a token.

``kernel.py`` is the entry point. It runs ``pages.py`` or ``int8_fp8.py``, named by what the pages store.
"""
