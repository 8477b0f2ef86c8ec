"""Checkpoints in attnlib's own form, each of whose layers may be of a size of its own."""
