"""Grouped-query attention with fewer KV heads: which become one, and how."""
