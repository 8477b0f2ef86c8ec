"""A drop-in replacement for flash-attn: ``import attnlib.compat.flash_attn as flash_attn``.

Signatures, layouts and conventions follow flash-attn 2: bottom-right causal masks, windows as
``(left, right)``, softcap, ALiBi, packed sequences, and a cache that is written in place. There is no
extension to build. It runs on CPUs, too, and with every head dimension that attnlib supports.
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
