"""Entries of test_malformed.py for masks, ropes and merging."""

from itertools import pairwise

import torch
from fuzz_entries import Entry, a_call, ints, numbers
from fuzz_values import INT32, finite, is_angles, is_bool, is_int, is_number, is_tensor, none_or
from torch import Tensor

import attnlib
from attnlib import CAUSAL, Angles, Axes, Mask, QueryTemperature, Rope, merge_states, mrope_positions, rotate
from attnlib.rope.scaling import LinearScaling
from attnlib.scaling import (
    DynamicNTKScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    YaRNScaling,
)


def mask_is_legal(a):
    bounds = none_or(a["left"], is_int) and none_or(a["right"], is_int) and is_int(a["prefix"], 0)
    return bounds and not (a["prefix"] and a["left"] is not None)


def axes_are_legal(a):
    """Blocks, the only order among the values that are tried."""
    sections = a["sections"]
    fit = isinstance(sections, tuple) and 1 <= len(sections) <= 4 and all(is_int(x, 1) for x in sections)
    return fit and isinstance(a["order"], str) and a["order"] == "blocks"


def rope_is_legal(a):
    scaling = a["scaling"]
    if a["axes"] is not None:  # no Axes are among the values that are tried
        return False
    if not (
        is_int(a["dim"], 2) and a["dim"] % 2 == 0 and is_number(a["theta"]) and is_bool(a["interleaved"])
    ):
        return False
    if isinstance(scaling, NTKScaling | DynamicNTKScaling):
        return a["dim"] >= 4
    return (
        scaling is None
        or isinstance(scaling, LinearScaling | Llama3Scaling)
        or (isinstance(scaling, YaRNScaling) and a["theta"] > 1)
    )


def is_factor(x):
    return is_number(x) and x >= 1


def llama_is_legal(a):
    low, high = a["low_freq_factor"], a["high_freq_factor"]
    return is_factor(a["factor"]) and is_number(low) and is_number(high) and high > low and is_count(a)


def is_count(a, least=1):
    return is_int(a["original_max_position"], least)


def yarn_is_legal(a):
    fast, slow = a["beta_fast"], a["beta_slow"]
    mscales = all(
        none_or(a[n], lambda x: is_number(x) or (type(x) in (int, float) and x == 0)) for n in MSCALES
    )
    numbers = is_factor(a["factor"]) and is_number(fast) and is_number(slow) and fast >= slow
    return (
        numbers
        and mscales
        and none_or(a["attention_factor"], is_number)
        and is_bool(a["truncate"])
        and is_count(a)
    )


def long_rope_is_legal(a):
    short, long = a["short_factor"], a["long_factor"]
    pairs = all(isinstance(x, tuple) and all(map(is_number, x)) for x in (short, long)) and len(short) == len(
        long
    )
    return pairs and is_factor(a["factor"]) and none_or(a["attention_factor"], is_number) and is_count(a, 2)


MSCALES = ("mscale", "mscale_all_dim")
YARN = {
    "factor": 4.0,
    "original_max_position": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": None,
}
YARN |= {"mscale": None, "mscale_all_dim": None, "truncate": True}
LONG = {"short_factor": (1.0,) * 4, "long_factor": (4.0,) * 4, "factor": 4.0, "original_max_position": 64}
LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}


def frequencies_are_finite(target, args, result):
    rope = result if isinstance(result, Rope) else Rope(8, scaling=result)
    if rope.dim < 1000:
        length = 100 if rope.needs_length else None
        assert rope.inverse_frequencies(length=length).isfinite().all()


def frequencies_of_its_pairs_are_finite(target, args, result):
    if result.short_factor:
        frequencies_are_finite(target, args, Rope(2 * len(result.short_factor), scaling=result))


def temperature_is_legal(a):
    return is_number(a["weight"]) and is_int(a["interval"], 1) and is_int(a["offset"], 0)


def positions_are_legal(a):
    whole = (torch.int8, torch.int32, torch.int64)
    return is_tensor(a["positions"], *whole) or meta(a["positions"], *whole)


def meta(x, *dtypes):
    return isinstance(x, Tensor) and x.device.type == "meta" and x.dtype in dtypes


def angles_are_legal(a):
    pair = (a["cos"], a["sin"])
    alike = all(is_tensor(x, torch.float32) and x.dim() for x in pair) or all(
        meta(x, torch.float32) for x in pair
    )
    return alike and pair[0].shape == pair[1].shape and is_bool(a["interleaved"])


def rotation_is_legal(a):
    x, angles = a["x"], a["angles"]
    if not is_tensor(x) or not is_angles(angles) or x.dim() < 2 or angles.cos.device.type != "cpu":
        return False
    given, tokens = angles.cos.shape[:-1], x.shape[:-2]
    if 2 * angles.cos.shape[-1] > x.shape[-1] or len(given) > len(tokens) or given[-1:] != tokens[-1:]:
        return False
    return all(n in (1, m) for n, m in zip(reversed(given), reversed(tokens), strict=False))


def norms_are_kept(target, args, result):
    assert (result.shape, result.dtype) == (args["x"].shape, args["x"].dtype)
    if finite(args):
        norms = (x.detach().as_subclass(Tensor).double().norm(dim=-1) for x in (result, args["x"]))
        torch.testing.assert_close(*norms, rtol=0.01, atol=1e-3)


def states(target):
    return {
        name: numbers(2, 5, 4, 3) if name[0] == "o" else numbers(2, 4, 5) + ord(name[-1]) % 2
        for name in STATES
    }


STATES = ("out_a", "lse_a", "out_b", "lse_b")


def states_are_legal(a):
    outs, lses = ([a[name] for name in STATES if name.startswith(start)] for start in ("out", "lse"))
    if not all(map(is_tensor, outs)) or not all(is_tensor(x, torch.float32, torch.float64) for x in lses):
        return False
    if any(x.dtype != y.dtype or x.shape != y.shape for x, y in (outs, lses)) or outs[0].dim() not in (3, 4):
        return False
    *b, s, h, _ = outs[0].shape
    return tuple(lses[0].shape) == (*b, h, s)


def shares_are_right(target, args, result):
    out_a, lse_a, out_b, lse_b = (args[name].detach().as_subclass(Tensor).double() for name in STATES)
    share = torch.sigmoid(lse_a - lse_b).transpose(-1, -2)[..., None]
    if finite(args):
        wanted = share * out_a + (1 - share) * out_b
        torch.testing.assert_close(result[0].detach().double(), wanted, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            result[1].detach().double(), torch.logaddexp(lse_a, lse_b), rtol=1e-5, atol=1e-5
        )


def mrope_is_legal(a):
    """The tokens of each grid, counted one by one, are side by side in a row."""
    types, grids, shown = a["token_types"], a["grids"], a.get("attention_mask")
    whole = (torch.bool, torch.int8, torch.int32, torch.int64)
    if not all(is_tensor(x, *whole) for x in (types, grids)):
        return False
    shown = torch.ones_like(types) if shown is None else shown
    if not is_tensor(shown, *whole) or shown.shape != types.shape:
        return False
    if grids.dim() != 2 or grids.shape[1] != 3 or (grids < 1).any() or not intervals_are_legal(a):
        return False
    rows = zip(types.tolist(), shown.tolist(), strict=True) if types.dim() == 2 else ()
    if "cu_seqlens" in a:
        offsets = a["cu_seqlens"]
        if not is_tensor(offsets, torch.int32, torch.int64) or types.dim() != 1 or offsets.dim() != 1:
            return False
        ends = offsets.tolist()
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > len(types):
            return False
        rows = [(types[i:j].tolist(), [1] * (j - i)) for i, j in pairwise(ends)]
    elif types.dim() != 2:
        return False
    sizes, left = [time * height * width for time, height, width in grids.tolist()], 0
    for row, there in rows:
        for token in (x for x, is_there in zip(row, there, strict=True) if is_there):
            left = (sizes.pop(0) if sizes else 0) if token and not left else left
            if bool(token) != bool(left):
                return False
            left -= bool(token)
        if left:
            return False
    return not sizes


def intervals_are_legal(a):
    x = a["time_intervals"]
    return x is None or (
        isinstance(x, Tensor)
        and not x.is_nested
        and (x.layout, x.device.type) == (torch.strided, "cpu")
        and not x.is_complex()
        and tuple(x.shape) == (len(a["grids"]),)
    )


def positions_fit_the_tokens(target, args, result):
    positions, following = result
    assert positions.shape == (3, *args["token_types"].shape)
    text = positions[:, args["token_types"] == 0]
    assert (text == text[:1]).all()
    if positions.dim() == 3:
        assert (following >= positions.amax((0, 2))).all()


X = numbers(2, 3, 4, 8)
ANGLES = Rope(8).angles(torch.arange(3))
CIRCLE = {"cos": ANGLES.cos, "sin": ANGLES.sin, "interleaved": False}
ROPE = {"dim": 8, "theta": 10_000.0, "scaling": None, "interleaved": False, "axes": None}
PROMPT = {"token_types": ints(0, 1, 1, 0, 2, 2), "grids": ints(1, 1, 2, 1, 2, 1).view(2, 3)}
PROMPT |= {"time_intervals": torch.tensor([1.0, 2.5])}
ROPES = {
    "Mask": a_call(Mask, {"left": None, "right": 0, "prefix": 0}, mask_is_legal, words=("mask",)),
    "Mask.shift": a_call(CAUSAL.shift, {"n": 2}, lambda a: is_int(a["n"], -INT32), words=("mask",)),
    "sliding": a_call(attnlib.sliding, {"window": 3}, lambda a: is_int(a["window"], 1)),
    "Axes": a_call(Axes, {"sections": (2, 1, 1), "order": "blocks"}, axes_are_legal),
    "mrope_positions": a_call(
        mrope_positions,
        PROMPT | {
            "token_types": PROMPT["token_types"][None],
            "attention_mask": ints(1, 1, 1, 0, 1, 1)[None],
            "time_intervals": None,
        },
        mrope_is_legal,
        positions_fit_the_tokens,
    ),
    "mrope_positions, packed": a_call(
        mrope_positions, PROMPT | {"cu_seqlens": ints(0, 4, 6)}, mrope_is_legal, positions_fit_the_tokens
    ),
    "Rope": a_call(Rope, ROPE, rope_is_legal, frequencies_are_finite),
    "Rope, yarn": a_call(
        Rope, ROPE | {"scaling": YaRNScaling(4.0, 64)}, rope_is_legal, frequencies_are_finite
    ),
    "LinearScaling": a_call(
        LinearScaling, {"factor": 2.0}, lambda a: is_factor(a["factor"]), frequencies_are_finite
    ),
    "NTKScaling": a_call(
        NTKScaling, {"factor": 2.0}, lambda a: is_factor(a["factor"]), frequencies_are_finite
    ),
    "DynamicNTKScaling": a_call(
        DynamicNTKScaling,
        {"factor": 2.0, "original_max_position": 8},
        lambda a: is_factor(a["factor"]) and is_count(a),
        frequencies_are_finite,
    ),
    "Llama3Scaling": a_call(Llama3Scaling, LLAMA, llama_is_legal, frequencies_are_finite),
    "YaRNScaling": a_call(YaRNScaling, YARN, yarn_is_legal, frequencies_are_finite),
    "LongRoPEScaling": a_call(
        LongRoPEScaling,
        LONG | {"attention_factor": None},
        long_rope_is_legal,
        frequencies_of_its_pairs_are_finite,
    ),
    "ProportionalScaling": a_call(
        ProportionalScaling,
        {"share": 0.5, "factor": 2.0},
        lambda a: is_number(a["share"]) and a["share"] <= 1 and is_factor(a["factor"]),
        frequencies_are_finite,
    ),
    "QueryTemperature": a_call(
        QueryTemperature, {"weight": 0.1, "interval": 8, "offset": 1}, temperature_is_legal
    ),
    "Rope.angles": a_call(Rope(8).angles, {"positions": torch.arange(3), "length": None}, lambda a: (
        positions_are_legal(a) and a["length"] is None
    )),
    "Rope.angles, axes": a_call(
        Rope(8, axes=Axes((2, 1, 1), "blocks")).angles,
        {"positions": torch.arange(9).view(3, 3), "length": None},
        lambda a: positions_are_legal(a) and a["length"] is None and a["positions"].shape[:1] == (3,),
    ),
    "Rope.angles, dynamic": a_call(
        Rope(8, scaling=DynamicNTKScaling(2.0, 4)).angles,
        {"positions": torch.arange(3), "length": 9},
        lambda a: positions_are_legal(a) and is_int(a["length"]),
    ),
    "Angles": a_call(Angles, CIRCLE, angles_are_legal, words=("angles",)),
    "rotate": a_call(rotate, {"x": X, "angles": ANGLES}, rotation_is_legal, norms_are_kept),
    "merge_states": Entry(
        lambda _, **a: merge_states(**a), states, lambda _, a: states_are_legal(a), shares_are_right
    ),
}  # fmt: skip
