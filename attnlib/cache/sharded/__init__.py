"""A KV cache sharded over ranks by token: token ``j`` of a sequence lives on rank ``j % n``.

This is decode context parallelism. The base of the cache knows nothing of it: ``sharding_of`` makes the
option that ``KVCache.paged(mesh=)`` hands on, ``buffers`` keeps what each rank has of a step, ``attend`` is
the route of such views, and ``ranks`` sends queries and partial results between ranks.
"""
