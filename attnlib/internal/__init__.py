"""Helpers for the whole package: argument checks, error messages, torch probes, files, plots, Philox.

Nothing here depends on attention. Add a helper here once two folders need it.
"""
