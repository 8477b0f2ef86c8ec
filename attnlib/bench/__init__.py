"""Benchmarks: ``python -m attnlib bench``."""
