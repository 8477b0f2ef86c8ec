"""Backends: each answers with the reasons it cannot solve a spec, and runs what it can."""
