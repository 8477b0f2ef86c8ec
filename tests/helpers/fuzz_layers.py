"""Entries of test_malformed.py for layers."""

import copy
from functools import partial

import torch
from fuzz_caches import D, G, H, M, Used, is_dtype, is_own, is_size
from fuzz_entries import Entry, a_call, ints, numbers
from fuzz_values import finite, is_angles, is_bool, is_int, is_mask, is_number, is_tensor, none_or
from torch import Tensor

from attnlib import (
    CAUSAL,
    FULL,
    Gate,
    GroupedQueryAttention,
    Indexer,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rope,
    shared_angles,
)
from attnlib.layers.parameters import PROJECTIONS
from attnlib.qk_clip import clip_
from attnlib.rope.scaling import QueryTemperature

X = numbers(2, 3, M)

GROUPED = {
    "hidden_size": M, "num_heads": H, "mask": CAUSAL, "num_kv_heads": None, "head_dim": D, "bias": False,
    "output_bias": None, "rope": Rope(4), "qk_norm": False, "norm_eps": 1e-6, "sinks": False, "softcap": None,
    "alibi": False, "scale": None, "dropout_p": 0.0, "dtype": None, "temperature": None,
    "norm_after_rope": False, "context_parallel": None, "gate": None, "own_keys": True, "values": None,
}  # fmt: skip
LATENT = {
    "hidden_size": M, "num_heads": H, "mask": CAUSAL, "q_lora_rank": None, "kv_lora_rank": 8,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "bias": False, "rope": Rope(4),
    "norm_eps": 1e-6, "scale": None, "dropout_p": 0.0, "form": "auto", "dtype": None, "temperature": None,
    "context_parallel": None, "gate": None, "own_keys": True,
}  # fmt: skip


def options_are_legal(a, *flags):
    p = a["dropout_p"]
    numbers = all(none_or(a.get(name), is_number) for name in ("scale", "softcap")) and is_number(
        a["norm_eps"]
    )
    dropout = isinstance(p, int | float) and not is_bool(p) and 0 <= p < 1
    types = (
        none_or(a["temperature"], lambda x: isinstance(x, QueryTemperature))
        and is_mask(a["mask"])
        and none_or(a["rope"], lambda x: isinstance(x, Rope))
        and none_or(a["dtype"], is_dtype)
        and none_or(a["gate"], lambda x: isinstance(x, Gate))
        and a["context_parallel"] is None  # ranks are none of the values here
    )
    return numbers and dropout and types and all(is_bool(a[name]) for name in flags)


def grouped_is_legal(kv_heads):
    """``kv_heads`` says which numbers of KV heads a class takes for a number of heads."""

    def legal(a):
        sizes = is_size(a["hidden_size"]) and is_size(a["num_heads"]) and none_or(a["num_kv_heads"], is_size)
        if not (sizes and none_or(a["head_dim"], is_size) and none_or(a["output_bias"], is_bool)):
            return False
        if a["num_kv_heads"] is not None and not kv_heads(a["num_heads"], a["num_kv_heads"]):
            return False
        if a["head_dim"] is None and a["hidden_size"] % a["num_heads"]:
            return False
        width = a["head_dim"] or a["hidden_size"] // a["num_heads"]
        names = (
            isinstance(a["bias"], tuple) and a["output_bias"] is None and set(a["bias"]) <= set(PROJECTIONS)
        )
        if not (names or is_bool(a["bias"])):
            return False
        flags = ("norm_after_rope", "qk_norm", "sinks", "alibi", "own_keys")
        values = none_or(a["values"], lambda x: isinstance(x, str) and x == "keys")
        return options_are_legal(a, *flags) and values and none_or(a["rope"], lambda rope: rope.dim <= width)

    return legal


def latent_is_legal(a):
    sizes = [
        a[name] for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    ]
    if (
        not all(map(is_size, sizes))
        or not is_int(a["qk_rope_head_dim"], 0)
        or not none_or(a["q_lora_rank"], is_size)
    ):
        return False
    form = isinstance(a["form"], str) and a["form"] in ("auto", "expanded", "absorbed")
    rotated = 0 if a["rope"] is None else getattr(a["rope"], "dim", None)
    return form and options_are_legal(a, "bias", "own_keys") and rotated == a["qk_rope_head_dim"]


def runs_once(target, args, layer):
    x = torch.randn(1, 3, args["hidden_size"], dtype=args["dtype"] or torch.float32)
    assert not layer.own_keys or layer(x).shape == x.shape


def is_x(x, *lead):
    """Hidden states fp32 ``[*lead, m]``."""
    return is_tensor(x, torch.float32) and tuple(x.shape) == (*lead, M)


def is_some_x(x, rank):
    return is_tensor(x, torch.float32) and x.dim() == rank and x.shape[-1] == M


def positions_are_legal(positions, *shapes):
    """None, or integers for tokens of one of these shapes."""
    whole = (torch.int8, torch.int32, torch.int64)
    return positions is None or (is_tensor(positions, *whole) and tuple(positions.shape) in shapes)


def angles_are_legal(angles, *shapes):
    """None, or angles of the layer's rope, for tokens of one of these shapes."""
    if angles is None:
        return True
    if not is_angles(angles):
        return False
    lead, width = angles.cos.shape[:-1], 2 * angles.cos.shape[-1]
    mine = angles.cos.device.type == "cpu" and (angles.interleaved, width) == (False, 4)
    return mine and tuple(lead) in shapes


def mask_is_legal(mask, *shape):
    """None, or bools or integers of this shape."""
    return mask is None or (
        is_tensor(mask) and not (mask.is_floating_point() or mask.is_complex()) and tuple(mask.shape) == shape
    )


def dense_is_legal(layer, a):
    others = ("context", "kv", "cu_seqlens", "keys")
    if not is_some_x(a["x"], 3) or any(a.get(name) is not None for name in others):
        return False
    (b, s, _), positions = a["x"].shape, a["positions"]
    shapes = (s,), (1, s), (b, s)
    others = angles_are_legal(a.get("angles"), *shapes) and mask_is_legal(a.get("attention_mask"), b, s)
    return others and positions_are_legal(positions, *shapes) and not begin_again(positions)


def begin_again(positions):
    """Where nothing tells sequences apart."""
    return isinstance(positions, Tensor) and bool(
        ((positions[..., 1:] == 0) & (positions[..., :-1] > 0)).any()
    )


def packed_is_legal(layer, a):
    cu = a["cu_seqlens"]
    if not is_some_x(a["x"], 2) or not is_tensor(cu, torch.int32) or cu.dim() != 1 or not len(cu):
        return False
    fits = cu[0] == 0 and bool((cu.long().diff() >= 0).all()) and cu[-1] <= len(a["x"])
    positions = positions_are_legal(a["positions"], (len(a["x"]),))
    return fits and positions and a["context"] is None and a["kv"] is None


def crossing_is_legal(layer, a):
    if not is_some_x(a["x"], 3) or a["kv"] is not None or a["cu_seqlens"] is not None:
        return False
    positions = none_or(a["positions"], lambda x: isinstance(x, Tensor))  # without rope unused
    return positions and none_or(a["context"], lambda x: is_some_x(x, 3) and len(x) == len(a["x"]))


def step_is_legal(used, a):
    if is_own(a["kv"]):
        positions = none_or(a["positions"], lambda x: isinstance(x, Tensor))
        return is_x(a["x"], 2, 3) and positions and a["context"] is None and a["cu_seqlens"] is None
    return crossing_is_legal(None, a)


def storing_is_legal(used, a):
    return is_x(a["context"], 2, 3) and is_own(a["kv"])


def is_that_of_the_definition(layer, args, result):
    """Equal to the same layer in fp64 over the definition of attention."""
    if finite(args):
        wide = copy.deepcopy(layer).double()
        wide.backend = "reference"
        doubled = {name: args[name].detach().double() for name in ("x", "context") if args[name] is not None}
        torch.testing.assert_close(result.detach().double(), wide(**args | doubled), rtol=1e-4, atol=1e-4)


def weights_are_legal(layer, a):
    """Of ``over``, "none" needs rows, and "heads" would need keys ``at``, which are left out."""
    if not dense_is_legal(layer, nothing_else(a)) or a["at"] is not None or not isinstance(a["over"], str):
        return False
    rows, shapes = a["rows"], ((), (len(a["x"]),))
    if rows is None:
        return a["over"] == "queries"
    ints_of = is_tensor(rows, torch.int32, torch.int64) and rows.dim() in (1, 2)
    return ints_of and a["over"] in ("none", "queries") and tuple(rows.shape[:-1]) in shapes


def maxima_are_legal(layer, a):
    of = isinstance(a["of"], str) and a["of"] in ("scores", "products")
    return of and dense_is_legal(layer, nothing_else(a))


def nothing_else(a):
    return dict.fromkeys(("context", "kv", "cu_seqlens")) | a


def are_those_of_the_definition(method):
    """Equal to the results of the same method in fp64."""

    def right(layer, args, result):
        if finite(args):
            wide = copy.deepcopy(layer).double()
            wide.backend = "reference"
            expected = getattr(wide, method)(**args | {"x": args["x"].detach().double()})
            torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)

    return right


def maxima_of_heads_are_legal(layer, a):
    maxima, bound = a["maxima"], a["bound"]
    fits = is_tensor(maxima) and maxima.is_floating_point() and tuple(maxima.shape) == (H,)
    return fits and is_number(bound)


def are_factors_of_groups(layer, args, g):
    """The factor of each head is that of the largest maximum in its group."""
    if finite(args):
        groups = getattr(layer, "num_kv_heads", H)
        largest = args["maxima"].double().unflatten(0, (groups, -1)).amax(1).repeat_interleave(H // groups)
        bound = float(args["bound"])
        torch.testing.assert_close(g.double(), bound / largest.clamp(min=bound), rtol=1e-6, atol=1e-30)


def keeps_its_shape(used, args, result):
    assert result is None or result.shape == args["x"].shape


def layers(**more):
    torch.manual_seed(5)
    yield "GroupedQueryAttention", GroupedQueryAttention(**GROUPED | {"num_kv_heads": G} | more)
    more |= {"qk_rope_head_dim": 0} if "rope" in more else {}  # which is None
    yield "MultiHeadLatentAttention", MultiHeadLatentAttention(**LATENT | more)


def forwards():
    """The ways to call a layer, and append_context."""
    words = ("angles", "q", "k", "v", "cu_seqlens_q", "latent", "k_rope")
    nothing = dict.fromkeys(("context", "kv", "positions", "cu_seqlens"))

    def entry(layer, more, legal):
        inputs = nothing | {"x": X, **more}
        right = is_that_of_the_definition
        return Entry(
            lambda layer, **a: layer(**a), lambda _: dict(inputs), legal, right, lambda: layer, words
        )

    sharing = next(layer for _, layer in layers())
    yield "shared_angles", Entry(
        lambda layer, x, **a: layer(
            x, kv=a["kv"], cu_seqlens=a["cu_seqlens"], angles=shared_angles([layer], x, **a)[0]
        ),
        lambda _: {"x": X, "kv": None, "positions": torch.arange(3), "cu_seqlens": None},
        lambda layer, a: dense_is_legal(layer, a | {"context": None}),
        lambda layer, args, out: is_that_of_the_definition(layer, args | {"context": None}, out),
        lambda: sharing, words,
    )  # fmt: skip
    for name, layer in layers():
        yield (
            f"{name}.forward",
            entry(
                layer,
                {"positions": torch.arange(3), "angles": None, "attention_mask": None, "keys": None},
                dense_is_legal,
            ),
        )
        yield (
            f"{name}.forward, packed",
            entry(layer, {"x": X[0], "cu_seqlens": ints(0, 1, 3)}, packed_is_legal),
        )
        tokens = {"x": X, "positions": torch.arange(3)}
        for method, more, legal in (
            ("weights", {"over": "queries", "rows": None, "at": None}, weights_are_legal),
            ("maxima", {"of": "scores"}, maxima_are_legal),
        ):
            yield f"{name}.{method}", Entry(
                lambda layer, method=method, **a: getattr(layer, method)(**a),
                lambda _, more=tokens | more: dict(more), legal, are_those_of_the_definition(method),
                lambda layer=layer: layer, (*words, "lse"),
            )  # fmt: skip
        yield f"clip_, {name}", Entry(
            lambda layer, **a: clip_(copy.deepcopy(layer), **a),
            lambda _: {"maxima": torch.full((H,), 200.0), "bound": 100.0},
            maxima_of_heads_are_legal,
            are_factors_of_groups,
            lambda layer=layer: layer,
        )  # fmt: skip
    for name, layer in layers(rope=None, mask=FULL):
        yield f"{name}.forward, crossing", entry(layer, {"context": X[:, :2]}, crossing_is_legal)
        used, own = partial(Used, layer), {"kv": "its own"}
        yield f"{name}.forward, cached", Entry(
            lambda used, **a: used.forward(**a), lambda _, own=own: nothing | own | {"x": X}, step_is_legal,
            keeps_its_shape, used, words,
        )  # fmt: skip
        yield f"{name}.append_context", Entry(
            lambda used, **a: used.append_context(**a), lambda _, own=own: own | {"context": X},
            storing_is_legal, keeps_its_shape, used, words,
        )  # fmt: skip


def gate_is_legal(a):
    per, activation = (isinstance(a[name], str) and a[name] for name in ("per", "activation"))
    known = per in ("head", "channel") and activation in ("sigmoid", "softplus")
    return known and is_bool(a["bias"])


INDEXER = {
    "heads": 2, "head_dim": 8, "top": 4, "source": "x", "norms": "rms", "fp32": False, "query_scale": False,
    "activation": "relu", "weighted": False, "scale": 0.5, "per": "all", "rope": Rope(4),
    "rope_place": "last", "block_size": 4, "pool": "mean", "norm_after_pool": True, "local": 1, "first": 1,
    "tail": True,
}  # fmt: skip


def indexer_is_legal(a):
    counts = all(is_int(a[name], 1) for name in ("heads", "head_dim", "top", "block_size"))
    counts = (
        counts and is_int(a["local"], 0) and is_int(a["first"], 0) and a["local"] + a["first"] <= a["top"]
    )
    flags = all(is_bool(a[name]) for name in ("fp32", "query_scale", "weighted", "norm_after_pool", "tail"))
    known = {"source": ("x", "latent", "normed"), "norms": ("layer", "rms"), "activation": ("relu", None)}
    known |= {"per": ("all", "group"), "rope_place": ("first", "last"), "pool": ("max", "mean", None)}
    words = all(isinstance(a[name], str | None) and a[name] in values for name, values in known.items())
    if not (counts and flags and words and none_or(a["scale"], is_number)):
        return False
    if a["rope"] is not None and not (isinstance(a["rope"], Rope) and a["rope"].dim <= a["head_dim"]):
        return False
    pooled = (a["pool"] is not None) == (a["block_size"] > 1) and (a["tail"] <= (a["block_size"] > 1))
    means = a["tail"] if a["pool"] == "mean" else not a["norm_after_pool"]
    return pooled and means and not (a["per"] == "group" and a["weighted"])


LAYERS = {
    "Gate": a_call(Gate, {"per": "head", "activation": "softplus", "bias": True}, gate_is_legal),
    "Indexer": a_call(Indexer, INDEXER, indexer_is_legal),
    "GroupedQueryAttention": a_call(
        GroupedQueryAttention,
        GROUPED | {"num_kv_heads": G},
        grouped_is_legal(lambda h, g: h % g == 0),
        runs_once,
    ),
    "MultiHeadAttention": a_call(MultiHeadAttention, GROUPED, grouped_is_legal(int.__eq__), runs_once),
    "MultiQueryAttention": a_call(
        MultiQueryAttention, GROUPED, grouped_is_legal(lambda h, g: g == 1), runs_once
    ),
    "MultiHeadLatentAttention": a_call(MultiHeadLatentAttention, LATENT, latent_is_legal, runs_once),
    **dict(forwards()),
}
