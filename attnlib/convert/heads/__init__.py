"""Conversion of grouped-query attention to fewer KV heads: grouping, alignment and merging."""
