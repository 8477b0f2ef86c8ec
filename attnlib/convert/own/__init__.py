"""Converters to attnlib's own checkpoint form, in which each layer may have its own size."""
