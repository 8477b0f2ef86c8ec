"""Latents of layers with norms of q and k: linear maps of normalized heads, instead of the layer's inputs."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..calibration import Calibration
from ..weights import Heads


def normed(heads: Heads, calibration: Calibration, *, eps: float) -> tuple[Heads, Calibration]:
    """Return heads that read normalized queries, normalized keys and values as their inputs, without norms.

    The inputs are ``[q, k, v]``, flattened: their moments are those of the calibration's sample, because
    norms are not linear. Without a sample, they are uncorrelated and of equal variance.
    """
    kinds = (heads.q, heads.k, heads.v)
    sizes = [x.shape[0] * x.shape[1] for x in kinds]
    eye = pad(torch.eye(sum(sizes), dtype=heads.q.dtype, device=heads.q.device), (0, 1))
    rows = [some.unflatten(0, x.shape[:2]) for some, x in zip(eye.split(sizes), kinds, strict=True)]
    plain = replace(heads, q=rows[0], k=rows[1], v=rows[2], gains=None)
    y = calibration.inputs()
    if y is None:
        return plain, Calibration.white(sum(sizes), heads.q.device)
    q, k, v = (torch.einsum("nm,hdm->nhd", y, x) for x in kinds)
    q, k = (
        gain * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for x, gain in zip((q, k), heads.gains, strict=True)
    )
    inputs = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    with_one = pad(inputs, (0, 1), value=1.0)
    return plain, Calibration(len(inputs), with_one.T @ with_one / len(inputs), inputs)


def on_inputs(state: Mapping[str, Tensor], heads: Heads, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a layer with NormedQueries and NormedKeys, from that of :func:`normed` heads.

    ``heads`` are the heads before, and ``weights`` their layer's state dict.
    """
    (h, d), keys = heads.q.shape[:2], heads.k.shape[0] * heads.k.shape[1]
    q = state["q_proj.weight"].unflatten(0, (h, -1))
    own = [rows[:, n * d : (n + 1) * d] for n, rows in enumerate(q)]
    k, v = state["kv_a_proj_with_mqa.weight"][:, h * d :].tensor_split((keys,), 1)
    v = v @ heads.v.flatten(0, 1)
    new = {name: value for name, value in state.items() if name != "q_proj.bias"}
    new |= {"q_proj.weight": torch.cat(own), "kv_a_proj_with_mqa.weight": torch.cat((k, v[:, :-1]), 1)}
    if "kv_a_proj_with_mqa.bias" in state:
        new["kv_a_proj_with_mqa.bias"] = state["kv_a_proj_with_mqa.bias"] + v[:, -1]
    for name, ours in (("q", "q_proj"), ("k", "kv_a_proj_with_mqa")):
        moved = {f"{name}_proj.weight": "heads.weight", f"{name}_proj.bias": "heads.bias"}
        moved |= {f"{name}_norm.weight": "norm.weight"}
        new |= {f"{ours}.{inner}": weights[old] for old, inner in moved.items() if old in weights}
    return new
