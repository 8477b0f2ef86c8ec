"""Shared prefixes: sequences that begin with the same cache pages read these pages once per group.

``groups`` finds neighbouring sequences of a step that share pages, ``buffers`` keeps the page tables of the
groups on the device, and ``attend`` computes attention: one call over the shared keys, one call over each
sequence's own keys, and a merge of both results.

Hydragen (Juravsky et al., 2024, arXiv 2402.05099); cascade inference in FlashInfer (Ye et al., 2025, arXiv
2501.01005).
"""
