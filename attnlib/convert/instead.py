"""Suggest other targets for a model that the requested target refuses; each suggestion is tried first."""

from .checkpoint.errors import RequestError
from .checkpoint.model import CheckpointModel
from .own.grouped import GroupedKind
from .own.kind import Kind
from .own.latent import LatentKind
from .own.sizes import require_loadable, smallest

GROUPED, LATENT = (
    "KV heads (--kv-heads N, or --cache SIZE --layers gqa)",
    "latents (--rank N or --cache SIZE)",
)
NONE = "; no target makes the cache of this model type smaller"


def instead(model: CheckpointModel) -> str:
    """Return the end of an error message, which names the targets and options that accept ``model``."""
    others = [] if model.family.kv_heads is None else ["--to gqa"]
    latents = LatentKind(model, None, "cpu", {"rope_dim": None, "q_rank": None})
    kinds = {GROUPED: GroupedKind(model, None, "cpu", {}), LATENT: latents}
    if own := [name for name, kind in kinds.items() if _is_loadable(kind)]:
        others.append(f"--to attnlib with {' or '.join(own)}")
    return f"; use {', or '.join(others)}" if others else NONE


def _is_loadable(kind: Kind) -> bool:
    if kind.model.family.is_hybrid:
        return False
    try:
        require_loadable(kind, smallest(kind))
    except RequestError:
        return False
    return True
