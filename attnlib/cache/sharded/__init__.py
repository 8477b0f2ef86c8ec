"""A KV cache sharded over ranks by token: token ``j`` of a sequence lives on rank ``j % n``.

This is decode context parallelism. The other modules of the cache do not depend on it. ``buffers`` has the
option for ``KVCache.paged(mesh=)`` and the buffers of each rank's tokens, ``attend`` computes attention over
the shards, and ``ranks`` sends queries and partial results between ranks.
"""
