"""The KV cache: what a token stores (layout), who owns which page (pages), and steps that write (kv_cache).

Imports nothing itself: ``functional`` reads ``layout``, and ``kv_cache`` writes through ``functional``.
"""
