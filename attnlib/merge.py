"""Merge partial attention results, as split-KV decoding, shared prefixes and chunked attention do."""

import torch
from torch import Tensor

from .internal.checks import bind, is_strided, refuse_tensor
from .internal.signatures import kind
from .kv import DTYPES


@kind
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over the union of two disjoint sets of keys, from the attention over each set.

    Outputs are ``[b, s, h, e]`` with LSE ``[b, h, s]``, or packed ``[t, h, e]`` with ``[h, t]``. The merge is
    associative, has the identity ``(0, -inf)``, and is differentiable. It computes in fp32, or in fp64 for
    fp64 inputs. An LSE of +inf gives NaN.

    Raises:
        ValueError: the shapes or devices do not match.
        TypeError: the dtypes of the two outputs, or of the two LSEs, differ, or an LSE is not fp32 or fp64.
    """
    states = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    for n, (name, x) in enumerate(states):
        if not is_strided(x):
            refuse_tensor(name, x)
        first, dtypes = states[n % 2], (torch.float32, torch.float64) if n % 2 else DTYPES
        if x.dtype not in dtypes or x.dtype != first[1].dtype:
            raise TypeError(
                f"{name}: expected {' or '.join(map(str, dtypes))}, the same in both states, got {x.dtype}"
            )
        if x.device != out_a.device:
            raise ValueError(f"{name}: expected device {out_a.device} like out_a, got {x.device}")
    dims = ("bshe", "bhs") if out_a.dim() == 4 else ("she", "hs")
    bind(*((name, x, dims[n % 2]) for n, (name, x) in enumerate(states)))
    wide = torch.float64 if torch.float64 in (out_a.dtype, lse_a.dtype) else torch.float32
    lse_a, lse_b = lse_a.to(wide), lse_b.to(wide)
    highest = torch.maximum(lse_a, lse_b).detach()
    highest = highest.masked_fill(highest == -torch.inf, 0)
    sum_a, sum_b = torch.exp(lse_a - highest), torch.exp(lse_b - highest)
    joint = sum_a + sum_b
    sees_nothing = joint == 0
    divisor = joint.masked_fill(sees_nothing, 1)
    lse = (highest + divisor.log()).masked_fill(sees_nothing, -torch.inf)
    weight_a, weight_b = _beside_output(sum_a / divisor), _beside_output(sum_b / divisor)
    return (weight_a * out_a.to(wide) + weight_b * out_b.to(wide)).to(out_a.dtype), lse


def _beside_output(x: Tensor) -> Tensor:
    """Reshape weights from an LSE's shape ``[..., h, s]`` to ``[..., s, h, 1]``, to multiply outputs."""
    return x.transpose(-1, -2)[..., None]
