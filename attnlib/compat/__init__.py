"""Drop-in replacements for other libraries: torch's SDPA, and the package flash-attn."""
