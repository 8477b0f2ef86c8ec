"""GQA decoding on Hopper, for few query rows over pages of keys and values.

A program reads several KV heads of a token at once, since they are adjacent in memory.

``kernel.py`` is the entry point. It runs ``pages.py`` or ``int8_fp8.py``, named by what the pages store.
"""
