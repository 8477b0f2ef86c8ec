"""The KV cache: who owns which page (pages), what every step tells the device (step), and the cache itself (kv_cache).

Imports nothing itself, so that each file can be imported alone.
"""
