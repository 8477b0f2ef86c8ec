"""Other libraries' signatures over attnlib: torch's SDPA, and flash-attn's package."""
