"""Attention to selected tokens of latents on Hopper (DeepSeek Sparse Attention), of tensors or a cache.

``kernel.py`` is the entry point. To the consumers of MLA decoding, the list of a query is a short sequence,
whose rows ``producer.py`` gathers, or ``int8_fp8.py`` if the cache is int8 or fp8.
"""
