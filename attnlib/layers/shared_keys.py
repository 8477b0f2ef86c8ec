"""Layers that attend to the keys of another layer.

Cross-layer attention (Brandon et al., 2024, arXiv 2405.12981), YOCO (Sun et al., 2024, arXiv 2405.05254),
Gemma 3n and Gemma 4 have such layers.
"""

from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..internal.checks import is_strided
from ..kv import KVView

Keys = tuple[Tensor, Tensor | None] | KVView


def check_keys(
    keys: Keys | None,
    x: Tensor,
    widths: tuple[int, int],
    *,
    own_keys: bool,
    is_latent: bool,
    first: nn.Module,
) -> None:
    """Validate the ``keys`` of a layer's call, which are tensors for the tokens of x, or a view of a cache.

    ``widths`` are the layer's channels of a key and a value, or of a latent and a rotary key. ``first`` is
    the first module that the layer calls on x.

    Raises:
        ValueError: keys are missing, or have other tokens than x or other widths.
        TypeError: keys have another type.
    """
    what = "source.latent(x, angles)" if is_latent else "source.key_value(x, angles)"
    if keys is None:
        if not own_keys:
            raise ValueError(
                f"keys: the layer has own_keys=False and needs those of another layer; pass keys={what}, or "
                "keys=layers[owner].view() in a cache step"
            )
        return
    if isinstance(keys, KVView):
        layout = keys.layout
        got = layout.dim, layout.rope_dim if is_latent else layout.value_dim
        if layout.is_latent != is_latent or got != widths:
            raise ValueError(f"keys: expected a view of {_named(widths, is_latent)}, got {layout}")
        return
    if not (
        isinstance(keys, tuple) and len(keys) == 2 and all(part is None or is_strided(part) for part in keys)
    ):
        remedy = "; pass its view()" if isinstance(keys, LayerCache) else ""
        raise TypeError(f"keys: expected {what} or a KVView, got {type(keys).__name__}{remedy}")
    got = tuple(0 if part is None else part.shape[-1] for part in keys)
    shapes = [None if part is None else tuple(part.shape) for part in keys]
    fits = all(part is None or part.shape[: x.dim() - 1] == x.shape[:-1] for part in keys)
    if got != widths or not (fits or first._forward_pre_hooks):  # a hook may add tokens to x (all-gather)
        raise ValueError(f"keys: expected {_named(widths, is_latent)} for x {tuple(x.shape)}, got {shapes}")


def refuse_own_keys(own_keys: bool) -> None:
    """Raise ValueError if the keys or the cache layout of a layer are asked for that has none."""
    if not own_keys:
        raise ValueError(
            "own_keys: expected a layer with keys of its own, got own_keys=False; ask the layer whose keys "
            "it reads, and leave this one out of the cache's layouts"
        )


def _named(widths: tuple[int, int], is_latent: bool) -> str:
    names = ("latents", "rotary keys") if is_latent else ("keys", "values")
    return " and ".join(f"{name} of {width} channels" for name, width in zip(names, widths, strict=True))
