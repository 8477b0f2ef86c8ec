"""Shared prefixes: neighbours in a step whose first pages are the same read them once for the whole group.

``groups`` finds such neighbours, ``buffers`` keeps the page tables of the groups on the device, and
``attend`` is the route of such views: one call over the shared keys, one over each sequence's own keys, and
a merge.

Hydragen (Juravsky et al., 2024, arXiv 2402.05099); cascade inference in FlashInfer (Ye et al., 2025, arXiv
2501.01005).
"""
