"""GQA decoding on Hopper, for few query rows over pages of keys and values.

A program reads several KV heads of a token at once, since they are adjacent in memory.

``kernel.py`` is the entry point. It runs ``pages.py`` for a 16-bit cache, and ``int8_fp8.py`` for an
int8 or fp8 cache.
"""
