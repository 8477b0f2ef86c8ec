"""QK-clip: after an optimizer step, shrink the query and key weights of heads whose scores are too large.

See Kimi Team, 2025, arXiv 2507.20534 (MuonClip). Their tau is ``bound``, their gamma is ``g``, and their
S_max is the largest product ``scale * q·k`` of a head over the visible pairs of a step.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .call.call import Call, Dropout
from .call.statistic import Statistic
from .dispatch.run import Interceptor, attend
from .dispatch.statistics import compute
from .internal.checks import bind, is_strided, refuse_tensor
from .internal.signatures import kind
from .kv import DTYPES
from .layers import GroupedQueryAttention, MultiHeadLatentAttention

if TYPE_CHECKING:  # importing torch.distributed takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh

FP32 = torch.finfo(torch.float32)
Layer = GroupedQueryAttention | MultiHeadLatentAttention


@kind
class QKClip:
    """QK-clip of all attention layers in a model: record the products of a step, and clip after it.

    The maxima come from the queries and keys that the layers compute anyway; nothing is projected twice. They
    are the largest of all recorded calls, which may be microbatches, and of all ranks: those of the meshes of
    DTensor weights (FSDP2 and tensor parallelism), those of a layer's ``context_parallel``, and those in
    ``mesh``. Recording works under torch.compile and activation checkpointing.

    Args:
        model: a module with attention layers, or an ``nn.ModuleList`` of some of its layers.
        bound: the largest product ``scale * q·k`` that is not clipped; see :func:`clip_`.
        mesh: ranks that train the same weights on other tokens, such as those of DistributedDataParallel. It
            may have several dimensions.

    Raises:
        TypeError, ValueError: there is no layer to clip, or a layer cannot be clipped, as in :func:`clip_`;
            or an argument does not fit.

    >>> model = MultiHeadAttention(64, 4, mask=CAUSAL)
    >>> optimizer, qk_clip = torch.optim.SGD(model.parameters(), lr=0.1), QKClip(model)
    >>> with qk_clip.record():
    ...     loss = model(torch.randn(2, 9, 64)).square().mean()
    >>> loss.backward()
    >>> optimizer.step()
    >>> qk_clip.step()["model"].shape
    torch.Size([4])
    """

    layers: dict[str, Layer]
    bound: float
    mesh: "DeviceMesh | None"

    def __init__(self, model: nn.Module, *, bound: float = 100.0, mesh: "DeviceMesh | None" = None):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        _check_bound(bound)
        if mesh is not None and not hasattr(mesh, "get_group"):
            raise TypeError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
        found = {path or "model": x for path, x in model.named_modules() if isinstance(x, Layer)}
        if not found:
            raise ValueError(f"model: expected a module with attention layers, got {type(model).__name__}")
        for path, layer in found.items():
            _check_layer(path, layer)
        self.layers, self.bound, self.mesh = found, bound, mesh
        self._maxima: dict[str, Tensor] = {}
        self._sharded = [path for path, layer in found.items() if _is_sharded(layer)]

    @contextmanager
    @kind
    def record(self) -> Iterator[None]:
        """Record the calls of the layers in a ``with`` block; the backward may be inside or outside.

        In the block, every layer computes the largest product of each query too. Queries of padding count,
        unless their products are NaN.
        """
        backends = {path: layer.backend for path, layer in self.layers.items()}
        try:
            for path, layer in self.layers.items():
                if path not in self._maxima:
                    self._maxima[path] = _nothing_yet(layer)
                layer.backend = _Recorder(layer.backend, self._maxima[path])
            yield
        finally:
            for path, layer in self.layers.items():
                layer.backend = backends[path]

    def step(self) -> dict[str, Tensor]:
        """Clip all layers in place, and return their maxima ``[h]`` since the last step, by path.

        Call it after ``optimizer.step()``, on every rank. The maxima are those before clipping. Nothing is
        read from the device.

        Raises:
            RuntimeError: no call has been recorded yet, or FSDP2 holds whole weights, as after an evaluation.
        """
        if not self._maxima:
            raise RuntimeError("step: expected calls of the model within `with record():`, got none")
        if whole := [path for path in self._sharded if not _is_sharded(self.layers[path])]:
            raise RuntimeError(
                f"step: expected sharded weights of {', '.join(whole)}, got whole ones, which FSDP2 will "
                "drop; call step() right after optimizer.step(), or reshard() of the model before it"
            )
        found = self._over_ranks()
        for path, layer in self.layers.items():
            clip_(layer, found[path], bound=self.bound)
            self._maxima[path].fill_(-torch.inf)
        return found

    def _over_ranks(self) -> dict[str, Tensor]:
        """Return the largest maxima of all ranks, with one exchange for all layers on the same meshes."""
        paths_of, found = defaultdict(list), {}
        for path, layer in self.layers.items():
            ranks = layer.context_parallel and layer.context_parallel.mesh
            meshes = getattr(_query_weight(layer), "device_mesh", None), ranks, self.mesh
            paths_of[meshes].append(path)
        for meshes, paths in paths_of.items():
            largest = torch.cat([self._maxima[path] for path in paths])
            for mesh in meshes:
                for dim in range(0 if mesh is None else mesh.ndim):
                    from torch.distributed import ReduceOp, all_reduce

                    all_reduce(largest, ReduceOp.MAX, mesh.get_group(dim))
            sizes = [self.layers[path].num_heads for path in paths]
            found |= zip(paths, largest.split(sizes), strict=True)
        return found


class _Recorder(Interceptor):
    """Runs calls, and keeps the largest product of each head in ``maxima`` ``[h]``.

    Calls have all heads of the layer, or begin at its head ``first``.
    """

    def __init__(self, name: str | None, maxima: Tensor, first: int | None = None):
        self.name, self.maxima, self.first = name, maxima, first

    def from_head(self, first: int) -> "_Recorder":
        return _Recorder(self.name, self.maxima, (self.first or 0) + first)

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        heads, total = call.q.shape[-2], self.maxima.shape[0]
        if self.first is None and heads != total:
            raise ValueError(
                f"q_proj: expected all {total} heads, or heads sharded by parallelize_module, got {heads}"
            )
        with torch.no_grad():
            # Without dropout, which would draw a seed from torch's generator
            plain = call._replace(dropout=Dropout(), lse=False)
            products = compute(plain, Statistic("products"), self.name)  # [..., h, s]
            if products.numel():
                products = products.masked_fill(products.isnan(), -torch.inf)
                largest = products.movedim(-2, 0).flatten(1).amax(1)
                own = self.maxima.narrow(0, self.first or 0, heads)
                own.copy_(torch.maximum(own, largest.to(own.device)))
        return attend(call, self.name)


def _nothing_yet(layer: Layer) -> Tensor:
    """Return the maxima ``[h]`` of a layer before its first call."""
    weight = _query_weight(layer)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.full((layer.num_heads,), -torch.inf, dtype=wide, device=weight.device)


def _is_sharded(layer: Layer) -> bool:
    return hasattr(_query_weight(layer), "device_mesh")


def _query_weight(layer: Layer) -> Tensor:
    return layer.query_projection.weight


@kind
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
    _check_bound(bound)
    _check_layer("layer", layer)
    if not is_strided(maxima):
        refuse_tensor("maxima", maxima)
    if maxima.dtype not in DTYPES:
        raise TypeError(f"maxima: expected fp16, bf16, fp32 or fp64, got {maxima.dtype}")
    if maxima.device != (device := _query_weight(layer).device):
        raise ValueError(f"maxima: expected device {device} like the weights, got {maxima.device}")
    bind(("maxima", maxima, "h"), known={"h": layer.num_heads})
    maxima, bound = maxima.detach().to(torch.promote_types(maxima.dtype, torch.float32)), float(bound)
    g, rows = _factors(layer, (bound / maxima).where((maxima > bound) & maxima.isfinite(), 1.0))
    for name, factors in rows.items():
        for x in getattr(layer, name).parameters(recurse=False):
            _scale_rows(x, factors)
    return g


def _check_bound(bound: float) -> None:
    """Raise TypeError or ValueError unless ``bound`` is a Python number above 0."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise TypeError(f"bound: expected a Python number, got {type(bound).__name__}")
    if not FP32.tiny <= bound <= FP32.max:
        raise ValueError(f"bound: expected a finite fp32 number above 0, got {bound}")


def _check_layer(path: str, layer: object) -> None:
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


@torch.no_grad()
def _scale_rows(x: Tensor, factors: Tensor) -> None:
    """Multiply the rows of a weight or bias in place; it may be a DTensor."""
    if hasattr(x, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        every = [Replicate()] * x.device_mesh.ndim
        factors = DTensor.from_local(factors, x.device_mesh, every, run_check=False)
    x.mul_(factors if x.dim() == 1 else factors[:, None])
