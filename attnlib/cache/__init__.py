"""The KV cache: what a token stores (layout), who owns which page (pages), and steps that write (kv_cache)."""

from .kv_cache import KVCache as KVCache
from .kv_cache import LayerCache as LayerCache
from .layout import KVLayout as KVLayout
from .layout import KVView as KVView
from .pages import CacheFullError as CacheFullError
from .pages import Handle as Handle
