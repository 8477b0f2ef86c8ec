"""Random dense and packed calls."""

import torch
from torch import Tensor

from .calls import Call, Lengths
from .draw import HEADS, SAME, Draw

SCORES = 1 << 18  # queries times keys times heads, so that a case takes milliseconds
PAIRS = 1 << 21  # channels of keys that every query gets for itself where some are NaN
BACKENDS = {
    "cpu": ("torch", "torch", "torch", None, "reference"),
    "interpreter": ("triton", "triton", None),
    "cuda": ("triton",),
}


def dense(draw: Draw) -> Call:
    """A call on ``[b, s, h, d]``."""
    return _call(draw, packed=False)


def varlen(draw: Draw) -> Call:
    """A call on packed sequences."""
    return _call(draw, packed=True)


def _call(draw: Draw, *, packed: bool) -> Call:
    (h, g), d = draw.one(HEADS), draw.dim()
    e = d if draw.maybe(0.6) else draw.dim()
    lengths = _packed(draw, h) if packed else _dense(draw, h)
    b, reach = len(lengths.queries), max((*lengths.queries, *lengths.keys), default=0) + 2
    bounds, dropout = {}, {}
    for name in ("key_starts", "key_ends"):
        if not packed and draw.maybe(0.2):
            bounds[name] = [draw.upto(reach, -3) if draw.maybe(0.8) else 0 for _ in range(b)]
    if draw.maybe(0.2):
        p = draw.one((0.0, 0.1, 0.5, 0.9, 0.999, 1e-9))
        dropout = {"dropout_p": p, "dropout_seed": draw.random.randrange(-(2**63), 2**63)}
    options = draw.options(b, h, d, reach=reach)
    aliased = d == e and draw.maybe(0.1)
    leaves = (
        [name for name in ("q", "k", "v", "alibi_slopes", "sinks") if draw.maybe(0.8)]
        if draw.maybe(0.6)
        else []
    )
    leaves = [x for x in leaves if x in "qk" or x in options or (x == "v" and not aliased)]
    given = draw.one((["out"], ["lse"], ["out", "lse"], ["out", "lse"]))
    split = draw.upto(reach) if not packed and draw.maybe(0.1) else None
    call = Call(
        draw,
        lengths,
        draw.dtype(),
        (h, g, d, e),
        draw.band(reach),
        {name: x for name, x in options.items() if not isinstance(x, Tensor)},
        bounds,
        dropout,
        [draw.how() for _ in "qkv"],
        _backend(draw, lengths),
        given != ["out"] or split is not None or draw.maybe(0.5),
        leaves,
        given,
        split,
    )
    _fill(call, {name: x for name, x in options.items() if isinstance(x, Tensor)}, aliased=aliased)
    return call


def _backend(draw: Draw, lengths: Lengths) -> str | None:
    name = draw.one(BACKENDS[draw.device])
    return (
        "torch" if name == "reference" and sum(lengths.queries) > 150 else name
    )  # which goes query by query


def _dense(draw: Draw, h: int) -> Lengths:
    b, s, t = draw.one((0, 1, 1, 1, 2, 2, 2, 3, 3, 5)), draw.length(), draw.length()
    if draw.maybe(0.4):
        t = s
    elif draw.maybe(0.2):
        s = 1
    while s * t * h * max(1, b) > SCORES:
        s, t, b = -(-s // 2), -(-2 * t // 3), max(1, b // 2)
    return Lengths(False, [s] * b, [t] * b) if b else Lengths(False, [], [])


def _packed(draw: Draw, h: int) -> Lengths:
    b = draw.one((0, 1, 1, 2, 2, 3, 3, 4, 7))
    queries, keys = ([draw.length() for _ in range(b)] for _ in "qk")
    if draw.maybe(0.5):
        keys = list(queries)
    while sum(s * t for s, t in zip(queries, keys, strict=True)) * h > SCORES:
        queries, keys = ([n // 2 for n in x] for x in (queries, keys))
    slack = [draw.one((0, 0, 0, 1, 3, 70)) for _ in "qk"]
    return Lengths(True, queries, keys, tuple(slack))


def _fill(call: Call, terms: dict[str, Tensor], *, aliased: bool) -> None:
    """Give the call its tensors: values, poison, strides."""
    draw, (h, g, d, e), lengths = call.draw, call.sizes, call.lengths
    sigma = draw.one((0.1, 1.0, 1.0, 3.0))
    values = {
        "q": draw.normal(*lengths.shape(0), h, d) * sigma,
        "k": draw.normal(*lengths.shape(1), g, d) * sigma,
        "v": draw.normal(*lengths.shape(1), g, e) * draw.one((0.1, 1.0, 10.0)),
    }
    if aliased:
        del values["v"]
    values = {name: x.to(call.dtype) for name, x in values.items()}
    if not any(how in SAME for how in call.hows):
        _poison(call, values | terms)
    call.tensors = {n: draw.arranged(x, how) for (n, x), how in zip(values.items(), call.hows, strict=False)}
    fused = d == e and lengths.shape(0) == lengths.shape(1) and not aliased and draw.maybe(0.2)
    if fused:
        qkv = torch.cat([values[name] for name in "qkv"], -2).to(draw.place)
        call.tensors = dict(zip("qkv", qkv.split((h, g, g), -2), strict=True))
        call.hows = ["of one qkv"] * 3
    call.tensors |= {name: draw.strided(x) for name, x in terms.items()}


def _poison(call: Call, tensors: dict[str, Tensor]) -> None:
    """NaN and infinities in rows of nobody and, now and then, in what no query sees; seldom a NaN that one
    does see.
    """
    draw, lengths = call.draw, call.lengths
    for name, slack in (("q", lengths.slack[0]), ("k", lengths.slack[1]), ("v", lengths.slack[1])):
        if slack and name in tensors:
            tensors[name][-slack:] = torch.nan
    sequences = call.cut(tensors)  # views, through which the tensors are written
    if draw.maybe(0.2):
        call.poison.append("hidden")
        for x in sequences:
            visible, bad = (
                x.visible(call.question(tensors).rule)[0],
                draw.one((torch.nan, torch.inf, -torch.inf)),
            )
            x.k[~visible.any(0)], x.v[~visible.any(0)], x.q[~visible.any(1)] = bad, bad, bad
    spots = [(x, keys) for x in sequences for keys in (True, False) if len(x.k if keys else x.q)]
    drops = call.dropout.get("dropout_p", 0) > 0  # and nobody says whether a weight of NaN is
    if spots and not drops and draw.maybe(0.25) and sum(len(x.q) * x.k.numel() for x in sequences) < PAIRS:
        x, keys = draw.one(spots)
        for y in (x.k, x.v) if keys else (x.q,):
            y[draw.upto(len(y) - 1), draw.upto(y.shape[1] - 1)] = torch.nan
        call.poison.append("seen")
        call.given, call.lse = ["out", "lse"], True  # a gradient of 0 times NaN is nobody's to say
