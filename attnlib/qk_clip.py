"""QK-clip: after an optimizer step, shrink the query and key weights of heads whose scores are too large.

See Kimi Team, 2025, arXiv 2507.20534 (MuonClip). Their tau is ``bound``, their gamma is ``g``, and their
S_max is the largest product ``scale * q·k`` of a head over the visible pairs of a step.
"""

import torch
from torch import Tensor, nn

from .internal.checks import bind, is_strided, refuse_tensor
from .internal.signatures import kind
from .layers import GroupedQueryAttention, MultiHeadLatentAttention

Layer = GroupedQueryAttention | MultiHeadLatentAttention


@kind
@torch.no_grad()
def clip_(layer: Layer, maxima: Tensor, *, bound: float = 100.0) -> Tensor:
    """Shrink the query and key weights of a layer in place, so that no product exceeds ``bound``.

    ``maxima`` ``[h]`` has the largest product ``scale * q·k`` of each head, before softcap, ALiBi and score
    functions. The products of head ``i`` are multiplied by ``g[i] = min(1, bound / maxima[i])``; the function
    returns g. A maximum that is NaN or infinite clips nothing.

    - In a grouped layer, the heads of a group share a key, so they share the smallest of their g. The rows
      and biases of q_proj and k_proj are multiplied by its square root.
    - If not only the scores read the keys, q_proj alone is multiplied, by each head's own g: with
      ``own_keys=False``, where the keys belong to another layer, and with ``values="keys"``.
    - In a latent layer, the unrotated rows of q and the key rows of kv_b_proj are multiplied by the square
      root of g, and the rotated rows of q by g. The rotary key, which all heads share, does not change.

    Weights may be DTensors, as FSDP2 and tensor parallelism make them. Then every rank passes the maxima of
    all heads and all ranks, as :meth:`QKClip.step` does.

    Raises:
        TypeError: the layer is no attnlib layer, or an argument has the wrong type.
        ValueError: a norm stands between the weights and the scores, a projection has no weight of its own,
            or maxima and bound do not fit. No weight has changed then.

    >>> layer = MultiHeadAttention(64, 4, mask=CAUSAL)
    >>> clip_(layer, torch.tensor([50.0, 200.0, 400.0, 90.0]))
    tensor([1.0000, 0.5000, 0.2500, 1.0000])
    """
    check_bound(bound)
    check_layer("layer", layer)
    if not is_strided(maxima):
        refuse_tensor("maxima", maxima)
    if not maxima.is_floating_point():
        raise TypeError(f"maxima: expected a float tensor, got {maxima.dtype}")
    bind(("maxima", maxima, "h"), known={"h": layer.num_heads})
    g, rows = _factors(layer, (bound / maxima).where((maxima > bound) & maxima.isfinite(), 1.0))
    for name, factors in rows.items():
        for x in getattr(layer, name).parameters(recurse=False):
            _scale_rows(x, factors)
    return g


def check_bound(bound: float) -> None:
    """Raise TypeError or ValueError unless ``bound`` is a Python number above 0."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise TypeError(f"bound: expected a Python number, got {type(bound).__name__}")
    if not 0 < bound < float("inf"):
        raise ValueError(f"bound: expected a finite number above 0, got {bound}")


def check_layer(path: str, layer: object) -> None:
    """Raise an error unless QK-clip can shrink the weights of the layer at ``path``; see :func:`clip_`."""
    if not isinstance(layer, Layer):
        expected = "a GroupedQueryAttention or MultiHeadLatentAttention"
        raise TypeError(f"{path}: expected {expected}, got {type(layer).__name__}")
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name, None) is not None:
            raise ValueError(
                f"{path}.{name}: expected None, got a norm, which undoes any scaling of the weights and "
                "bounds the scores itself; leave the layer out"
            )
    for name, factors in _factors(layer, torch.ones(layer.num_heads))[1].items():
        module = getattr(layer, name)
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        rows, shape = len(factors), None if weight is None else tuple(weight.shape)
        if not isinstance(module, nn.Linear) or shape is None or shape[0] != rows:
            raise ValueError(
                f"{path}.{name}: expected an nn.Linear with a weight of {rows} rows, got "
                f"{type(module).__name__} with weight {shape}; merge adapters, remove parametrizations, and "
                "shard weights as DTensors"
            )


def _factors(layer: Layer, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the factors ``[h]`` of products, and the factors of the rows of each projection that changes."""
    if isinstance(layer, MultiHeadLatentAttention):
        nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        query = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
        return g, {
            query: torch.cat((_times(g.sqrt(), nope), _times(g, rope)), 1).flatten(),
            "kv_b_proj": torch.cat((_times(g.sqrt(), nope), _times(torch.ones_like(g), value)), 1).flatten(),
        }
    width, groups = layer.head_dim, layer.num_kv_heads
    if not layer.own_keys or layer.values is not None:
        return g, {"q_proj": _times(g, width).flatten()}
    of_groups = g.unflatten(0, (groups, -1)).amin(1)
    g = _times(of_groups, layer.num_heads // groups).flatten()
    rows = {"q_proj": g, "k_proj": of_groups}
    return g, {name: _times(x.sqrt(), width).flatten() for name, x in rows.items()}


def _times(x: Tensor, n: int) -> Tensor:
    return x[:, None].expand(-1, n)


def _scale_rows(x: Tensor, factors: Tensor) -> None:
    """Multiply the rows of a weight or bias in place; it may be a DTensor."""
    factors = factors.to(x.device)
    if hasattr(x, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        every = [Replicate()] * x.device_mesh.ndim
        factors = DTensor.from_local(factors, x.device_mesh, every, run_check=False)
    x.mul_(factors if x.dim() == 1 else factors[:, None])
