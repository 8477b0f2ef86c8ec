"""Helpers for every room, not for users: argument checks, error messages, probes of torch, files, pictures,
Philox.

Nothing here knows about attention. A helper belongs here once two rooms need it.
"""
