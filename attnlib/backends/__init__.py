"""Backends: each reports why it cannot run a call, and runs those it can."""
