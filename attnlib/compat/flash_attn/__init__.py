"""flash-attn's package by its own names, over attnlib: ``import attnlib.compat.flash_attn as flash_attn``.

Signatures, layouts and rules are those of flash-attn 2: bottom-right causality, windows by ``(left, right)``,
softcap, ALiBi, packed sequences, and a cache that is written in place. Nothing is compiled for it, any head
dimension that attnlib runs is fine, and on a CPU it runs as well.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
