"""The KV cache. ``kv_cache.py`` is the cache itself, ``pages.py`` its page allocator.

``sequences.py`` keeps several allocators consistent, ``step.py`` holds the device buffers of a step, and
``layer_cache.py`` is one layer. Features that change how attention reads a cache have their own folders,
``sharded/`` and ``prefixes/``, and implement the interfaces of ``routes.py``.

This module imports nothing, so that each file can be imported on its own.
"""
