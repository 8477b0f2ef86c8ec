"""Validation of the constructor and forward arguments that all attention layers have in common."""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..call.call import Packing
from ..dispatch.warnings import warn_once
from ..gate import Gate
from ..indexing import Chosen
from ..internal.checks import are_checks_on, is_recorded, is_strided
from ..kv import DTYPES, KVLayout, KVView
from ..masks.band import AnyMask, Mask, refuse_mask
from ..masks.function import MaskFunction
from ..rope.axes import Axes
from ..rope.rope import Angles, Rope
from ..rope.scaling import QueryTemperature
from .context_parallel import ContextParallel, check_context_parallel
from .shared_keys import Keys

FP32 = torch.finfo(torch.float32)
UNRELATED = "context: positions of x and of a context are unrelated; use rope=None for cross-attention"


def check_options(
    mask: AnyMask,
    rope: Rope | None,
    temperature: QueryTemperature | None,
    gate: Gate | None,
    dropout_p: float,
    dtype: torch.dtype | None,
    *,
    numbers: Mapping[str, float],
    flags: Mapping[str, bool],
) -> None:
    """Raise ValueError or TypeError if a constructor argument is invalid; ``numbers`` must be positive."""
    if type(mask) not in (Mask, MaskFunction):  # kernels would ignore the methods of a subclass
        refuse_mask(mask)
    if rope is not None and not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope such as Rope(64, theta=10_000.0), got {type(rope).__name__}")
    if temperature is not None and not isinstance(temperature, QueryTemperature):
        raise TypeError(f"temperature: expected a QueryTemperature or None, got {type(temperature).__name__}")
    if gate is not None and not isinstance(gate, Gate):
        raise TypeError(f'gate: expected Gate("head"), Gate("channel") or None, got {gate!r}')
    for name, value in {**numbers, "dropout_p": dropout_p}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a Python number, got {type(value).__name__}")
        if name in numbers and not FP32.tiny <= value <= FP32.max:
            raise ValueError(f"{name}: expected a finite fp32 number above 0, got {value}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {dropout_p}")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
        raise TypeError(f"dtype: expected fp16, bf16, fp32 or fp64, got {dtype}")


def check_rope(rope: Rope | None, head_dim: int, norm_after_rope: bool) -> None:
    """Raise ValueError if a rope does not fit heads of dimension ``head_dim``."""
    if rope is not None and rope.dim > head_dim:
        raise ValueError(f"rope: expected dim at most head_dim={head_dim}, got {rope.dim}")
    if norm_after_rope and rope is not None and rope.amplitude != 1:
        raise ValueError(
            "norm_after_rope: expected a rope of amplitude 1, since the norm would undo any other"
        )


def check_latent_rope(rope: Rope | None, channels: int) -> None:
    """Raise ValueError unless the rope of an MLA layer rotates its ``qk_rope_head_dim`` channels.

    Warn if the rope does not rotate interleaved pairs of channels. DeepSeek's checkpoints need interleaved
    pairs, and a mismatch would go unnoticed, since the weights have the same shape.
    """
    if rope is None and channels:
        raise ValueError(
            f"rope: expected Rope({channels}, interleaved=True) for qk_rope_head_dim={channels}, got None; "
            "for a layer without rope use qk_rope_head_dim=0 and add the channels to qk_nope_head_dim"
        )
    if rope is not None and rope.dim != channels:
        raise ValueError(f"rope: expected dim={channels} like qk_rope_head_dim, got {rope.dim}")
    if rope is not None and not rope.interleaved:
        warn_once(
            f"rope: expected Rope({channels}, interleaved=True) as DeepSeek's layers rotate, got pairs of "
            "halves; weights trained with interleaved pairs give wrong results without any error",
            sys._getframe(3),  # the frame that called the constructor through its @kind wrapper
        )


class Inputs(NamedTuple):
    """The arguments of a layer's forward besides x; see :meth:`attnlib.GroupedQueryAttention.forward`."""

    context: Tensor | KVView | None = None
    keys: Keys | None = None
    kv: LayerCache | None = None
    positions: Tensor | None = None
    angles: Angles | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_context: Tensor | None = None
    key_starts: Tensor | None = None
    key_ends: Tensor | None = None
    attention_mask: Tensor | None = None
    mask: AnyMask | None = None
    selected: Chosen | Tensor | None = None
    context_parallel: ContextParallel | None = None  # an option of the layer, not of forward

    @property
    def is_stored(self) -> bool:
        """True if the keys are read from a cache."""
        return self.kv is not None or self.view is not None

    @property
    def view(self) -> KVView | None:
        """The stored keys that the call reads and does not append to."""
        if isinstance(self.keys, KVView):
            return self.keys
        return self.context if isinstance(self.context, KVView) else None

    @property
    def is_dense(self) -> bool:
        """True if the tokens of x and of the keys are neither packed nor in a cache."""
        return self.cu_seqlens is None and not self.is_stored

    @property
    def packing(self) -> Packing | None:
        """The offsets of the packed sequences in x and in its context; None if x is dense."""
        if self.cu_seqlens is None:
            return None
        return Packing(self.cu_seqlens, self.cu_seqlens if self.context is None else self.cu_seqlens_context)


def check(
    x: Tensor, hidden_size: int, given: Inputs, *, rope: Rope | None, mask: AnyMask, projection: nn.Module
) -> None:
    """Validate the inputs of a layer that has this ``mask`` and whose first module is ``projection``.

    Raises:
        ValueError, TypeError, RuntimeError: the inputs contradict the layer, each other or the cache step.
    """
    context, keys, kv = given.context, given.keys, given.kv
    check_tokens("x", x, hidden_size, projection)
    _check_types(given)
    if given.context_parallel is not None:
        _check_shared(given)
    for name in ("cu_seqlens", "cu_seqlens_context"):
        if getattr(given, name) is not None:
            _check_offsets(name, getattr(given, name), x.device)
    _check_together(x, given)
    if context is not None and rope is not None:
        raise ValueError(UNRELATED)
    if isinstance(context, Tensor):
        _check_context(context, x, hidden_size, projection)
        if not projection._forward_pre_hooks:  # a hook may add tokens to x (all-gather)
            _check_first_query(x, context, {"the layer": mask, "mask=": given.mask})
    if rope is not None:
        _check_positions(x, given.positions, projection, rope.axes)
    if rope is not None and given.is_dense and given.key_starts is given.key_ends is None:
        _check_restarts(given.positions, [mask] if given.mask is None else [mask, given.mask], rope.axes)
    if kv is not None:
        _check_step("x", x, kv.positions, projection)
        _check_autocast("kv", x, kv.layout)
    elif given.view is not None:
        if keys is not None and keys.positions is not None:
            _check_step("x", x, keys.positions, projection)
        _check_autocast("context" if keys is None else "keys", x, given.view.layout)


def _check_together(x: Tensor, given: Inputs) -> None:
    """Raise ValueError if arguments are given together that contradict each other, or one lacks another."""
    context, keys, kv, cu_seqlens = given.context, given.keys, given.kv, given.cu_seqlens
    if keys is not None and (context is not None or (kv is not None and kv.layout.has_keys)):
        raise ValueError(
            "keys: it excludes context= and kv=, which are other keys; pass one of them. A layer with "
            "select= and own_keys=False takes keys= and the kv= of its own kv_layout"
        )
    if isinstance(keys, KVView) and cu_seqlens is not None:
        raise ValueError("keys: a view of a cache excludes cu_seqlens=; it knows its own sequences")
    if kv is not None and (context is not None or cu_seqlens is not None):
        raise ValueError("kv: it excludes context= and cu_seqlens=; a cache step knows its own sequences")
    if cu_seqlens is not None and (x.dim() != 2 or (context is None) != (given.cu_seqlens_context is None)):
        raise ValueError(
            "cu_seqlens: expected packed x [t, m], and cu_seqlens_context= with a packed context [t, m] if "
            "there is one"
        )
    if given.cu_seqlens_context is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens_context: expected cu_seqlens= with it, for the packed x")
    for name in ("key_starts", "key_ends"):
        if getattr(given, name) is not None and not given.is_dense:
            raise ValueError(
                f"{name}: it bounds the keys of dense calls; a cache and packed sequences know their own"
            )
    if x.dim() == 2 and given.is_dense:
        raise ValueError(f"x: packed [t, m] needs cu_seqlens= or a packed cache step, got {tuple(x.shape)}")


def _check_shared(given: Inputs) -> None:
    """Raise ValueError if a cache or a context is given, since context parallelism supports neither."""
    check_context_parallel(given.context_parallel)
    stored = given.keys if isinstance(given.keys, KVView) else None
    refused = ("kv", given.kv, "decode"), ("context", given.context, "attend to a context")
    for name, x, instead in (*refused, ("keys", stored, "decode")):
        if x is not None:
            raise ValueError(
                f"{name}: expected None with context_parallel, which shards the tokens of x only; set "
                f"layer.context_parallel = None to {instead}"
            )


def _check_positions(x: Tensor, positions: Tensor | None, projection: nn.Module, axes: Axes | None) -> None:
    """Raise ValueError unless integer positions have one entry for each axis of the rope and token of x."""
    if not is_strided(positions) or projection._forward_pre_hooks:  # a hook may add tokens to x (all-gather)
        return
    first = () if axes is None else (len(axes.sections),)
    shape, tokens = positions.shape[len(first) :], x.shape[:-1]
    if (
        positions.shape[: len(first)] == first
        and shape[-1:] == tokens[-1:]
        and len(shape) <= len(tokens)
        and (len(shape) == 1 or shape[0] in (1, tokens[0]))
    ):
        return
    of_axes = "".join(f"axes={n}, " for n in first)
    forms = [f"t={tokens[0]}"] if x.dim() == 2 else [f"b={tokens[0]}, s={tokens[1]}", f"s={tokens[1]}"]
    expected, remedy = " or ".join(f"[{of_axes}{form}]" for form in forms), ""
    if positions.shape[: len(first)] != first:
        remedy = "; for text, whose positions are equal on all axes, pass positions.expand(axes, ...)"
    elif not first and len(shape) > 2:
        remedy = "; for several positions of a token (M-RoPE) give the layer Rope(..., axes=Axes(...))"
    got = tuple(positions.shape)
    raise ValueError(f"positions: expected {expected}, one for each token of x, got {got}{remedy}")


def _check_restarts(positions: Tensor | None, masks: list[AnyMask], axes: Axes | None) -> None:
    """Raise ValueError if positions restart at 0 within a row, and ``masks`` cannot separate sequences.

    Only mask functions can separate sequences. Of several axes, only the first is read. Positions on a GPU
    are read only with ATTNLIB_CHECK=1.
    """
    are_integers = is_strided(positions) and positions.dim() and positions.dtype in (torch.int32, torch.int64)
    if not (are_integers and all(isinstance(mask, Mask) for mask in masks)):
        return
    is_plain = type(positions) is Tensor and positions.device.type == "cpu" and not is_recorded(positions)
    if not (is_plain or are_checks_on(positions)):
        return
    positions = positions if axes is None else positions[0]
    if ((positions[..., 1:] == 0) & (positions[..., :-1] > 0)).any():
        raise ValueError(
            "positions: they begin again within a row, whose sequences would see each other; pack the row "
            f"with cu_seqlens={'' if axes else ' of packing.from_position_ids'}, or pass "
            "mask=attnlib.masks.documents(numbers)"
        )


def _check_context(context: Tensor, x: Tensor, hidden_size: int, projection: nn.Module) -> None:
    check_tokens("context", context, hidden_size, projection)
    if context.dim() != x.dim():
        expected = f"[b, t, m={hidden_size}]" if x.dim() == 3 else f"packed [t, m={hidden_size}] like x"
        raise ValueError(f"context: expected {expected}, got {tuple(context.shape)}")


def _check_first_query(x: Tensor, context: Tensor, masks: Mapping[str, AnyMask | None]) -> None:
    """Raise ValueError if the band of a mask hides a whole dense context from the first query.

    The last query is aligned with the last key, as in flash-attn, and a context may be too short for that.
    """
    queries, keys = x.shape[-2], context.shape[-2]
    if x.dim() != 3 or len(x) != len(context) or not 0 < keys < queries:
        return
    for name, mask in masks.items():
        first = keys - queries
        if not isinstance(mask, Mask | MaskFunction) or any(mask.band.keys(first, first + 1, keys)):
            continue
        raise ValueError(
            f"context: expected more tokens for {queries} queries, as {mask.band.spelled} of {name} aligns "
            f"the last query with the last key, got {keys}, which hides all keys from the first query; use "
            "mask=FULL in a layer whose queries see the whole context"
        )


def _check_types(given: Inputs) -> None:
    context, kv, positions, angles = given.context, given.kv, given.positions, given.angles
    if context is not None and not isinstance(context, Tensor | KVView):
        remedy = "; pass kv.view()" if isinstance(context, LayerCache) else ""
        got = f"{type(context).__name__}{remedy}"
        raise TypeError(f"context: expected a tensor [b, t, m] or a KVView, got {got}")
    if kv is not None:
        _check_is_layer_of_step(kv)
    if positions is not None and not isinstance(positions, Tensor):
        remedy = "; pass them as angles=" if isinstance(positions, Angles) else ""
        raise TypeError(f"positions: expected an integer tensor, got {type(positions).__name__}{remedy}")
    if angles is not None and not isinstance(angles, Angles):
        several = "; shared_angles returns one for each layer" if isinstance(angles, list) else ""
        got = f"{type(angles).__name__}{several}"
        raise TypeError(f"angles: expected Angles from rope.angles(positions), got {got}")


def _check_offsets(name: str, x: Tensor, device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``x`` holds offsets of packed sequences on this device."""
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        got = f"{x.dtype}; cast it with .int()" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected an int32 tensor [b + 1], got {got}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: expected a strided tensor [b + 1], got a nested or sparse one")
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name}: expected [b + 1] offsets, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like x, got {x.device}")


def check_stored(
    context: Tensor, kv: LayerCache, hidden_size: int, projection: nn.Module, rope: Rope | None
) -> None:
    """Raise ValueError, TypeError or RuntimeError if ``context`` cannot be projected or stored in ``kv``."""
    if rope is not None:
        raise ValueError(UNRELATED)
    check_tokens("context", context, hidden_size, projection)
    _check_is_layer_of_step(kv)
    _check_step("context", context, kv.positions, projection)
    _check_autocast("kv", context, kv.layout)


def _check_is_layer_of_step(kv: object) -> None:
    if not isinstance(kv, LayerCache):
        remedy = "; pass layers[i] for layer i" if isinstance(kv, tuple | list) else ""
        got = f"{type(kv).__name__}{remedy}"
        raise TypeError(f"kv: expected a layer of `with cache.step(...) as layers`, got {got}")


def _check_step(name: str, x: Tensor, positions: Tensor | None, projection: nn.Module) -> None:
    """Raise ValueError or RuntimeError unless ``x`` has the tokens of the step with these ``positions``."""
    if positions is None:
        raise RuntimeError(
            "kv: takes tokens only within `with cache.step(...) as layers`; pass kv=layers[i] there"
        )
    step = positions.shape
    if x.shape[:-1] == step or projection._forward_pre_hooks:  # a hook may add tokens to x (all-gather)
        return
    if len(step) == 1:
        expected, remedy = f"[t={step[0]}, m={x.shape[-1]}]", "step({handle: n}) is for packed tokens"
    elif step[0] == 0:
        expected, remedy = (
            f"[b=0, s={step[1]}, m={x.shape[-1]}]",
            "no sequence is live: call cache.admit(n) first",
        )
    else:
        expected = f"[b={step[0]}, s={step[1]}, m={x.shape[-1]}]"
        remedy = f"step({step[1]}) takes [b, s={step[1]}, m], step({{handle: n}}) packed [t, m]"
    raise ValueError(f"{name}: expected {expected} in this step of the cache, got {tuple(x.shape)}; {remedy}")


def _check_autocast(name: str, x: Tensor, layout: KVLayout) -> None:
    """Raise TypeError if autocast is on and would project ``x`` to another dtype than the cache's."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return
    dtype = computed_dtype(x)
    if layout.dtype != dtype:
        raise TypeError(
            f"{name}: expected a cache of {dtype}, in which torch.autocast computes, got {layout.dtype}; "
            "make it with the layer's kv_layout read within torch.autocast"
        )


def computed_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a projection of ``x``: autocast's if it is on, except for fp64, as in torch."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def check_tokens(name: str, x: Tensor, hidden_size: int, projection: nn.Module) -> None:
    """Raise ValueError or TypeError unless x is ``[b, s, m]`` or ``[t, m]`` and fits ``projection``.

    Device and dtype are compared only for a plain nn.Linear.
    """
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
        kind = "a nested or sparse one" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a strided tensor [b, s, m={hidden_size}], got {kind}")
    if x.dim() not in (2, 3) or x.shape[-1] != hidden_size:
        raise ValueError(
            f"{name}: expected [b, {'s' if name == 'x' else 't'}, m={hidden_size}] or packed [t, "
            f"m={hidden_size}], got {tuple(x.shape)}"
        )
    # A wrapper, a hook or an adapter may change x before the matrix product.
    if type(projection) is not nn.Linear or "forward" in vars(projection) or projection._forward_pre_hooks:
        return
    weight = projection.weight
    if x.device != weight.device:
        raise ValueError(f"{name}: expected device {weight.device} like the layer, got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name}: expected {weight.dtype} like the layer, got {x.dtype}; cast it, or use torch.autocast"
        )
