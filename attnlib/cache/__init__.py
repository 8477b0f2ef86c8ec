"""The KV cache: the page allocator (pages), the buffers of a step (step), and the cache itself (kv_cache).

Imports nothing itself, so that each file can be imported alone.
"""
