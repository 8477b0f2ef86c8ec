"""Drop-in replacements for other libraries: torch's SDPA and nn.MultiheadAttention, and flash-attn."""
