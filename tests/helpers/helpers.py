"""The measured tolerance, the naive attention it is measured against, and strategies for problems."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, attention_with_lse, sliding
from attnlib.internal.philox import dropout_keep

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def eager(
    q, k, v, *, sinks=None, dropout_p=0.0, dropout_seed=None, order=0, **terms
) -> tuple[Tensor, Tensor]:
    """Attention and LSE as one would first write them, in q's dtype; ``order`` is where it scales and adds
    from.
    """
    (b, s, h, _), t = q.shape, k.shape[1]
    v = v.repeat_interleave(h // v.shape[2], 2)
    logits = eager_scores(q, k, order=order, **terms)
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(q.dtype)[:, None, None].expand(b, h, s, 1)), -1)
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(nothing, 0)
    lse = torch.logsumexp(logits, -1).masked_fill(nothing[..., 0], -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(nothing, 0)[..., :t]
    if dropout_p > 0:
        where = {"sequences": torch.arange(b), "heads": torch.arange(h), "rows": torch.arange(t - s, t)}
        weights = (
            weights * dropout_keep(int(dropout_seed), dropout_p, **where, first=0, last=t) / (1 - dropout_p)
        )
    rows, keys = order * s // 3, order * t // 3
    weights, v = weights.roll((rows, keys), (-2, -1)), v.roll(keys, 1)
    return torch.einsum("bhst,bthe->bshe", weights, v).roll(-rows, 1), lse


def eager_scores(
    q, k, *, mask, scale=None, softcap=None, alibi_slopes=None, key_starts=None, key_ends=None, order=0
) -> Tensor:
    """Scores ``[b, h, s, t]``, -inf where hidden."""
    (b, s, h, d), t = q.shape, k.shape[1]
    k = k.repeat_interleave(h // k.shape[2], 2)
    scale = d**-0.5 if scale is None else scale
    rows = order * s // 3
    q = (q, q * scale, q * scale**0.5)[order].roll((rows, order * d // 3), (1, -1))
    k = (k * scale**0.5 if order == 2 else k).roll(order * d // 3, -1)
    scores = torch.einsum("bshd,bthd->bhst", q, k).roll(-rows, 2)
    scores = scores * scale if order == 0 else scores
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (torch.arange(t - s, t)[:, None] - torch.arange(t)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * distance
    return scores.masked_fill(~visible(b, s, t, mask, key_starts, key_ends)[:, None], -torch.inf)


def visible(b: int, s: int, t: int, mask: Mask, key_starts: Tensor | None, key_ends: Tensor | None) -> Tensor:
    """Which keys each query sees, bool ``[b, s, t]``."""
    i, j = torch.arange(t - s, t)[:, None], torch.arange(t)
    starts = torch.zeros(b) if key_starts is None else key_starts
    ends = torch.full((b,), t) if key_ends is None else key_ends
    return mask.visible(i, j) & (j >= starts[:, None, None]) & (j < ends[:, None, None])


@dataclass
class Problem:
    """The arguments of one dense call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self):
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in "qkv")
        return f"Problem({shapes}, {self.q.dtype}, {self.mask}, {sorted(self.options)})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))  # what hypothesis prints

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are asked for: q, k, v, and slopes and sinks where there are."""
        return [
            *self.tensors,
            *(self.options[name] for name in ("alibi_slopes", "sinks") if name in self.options),
        ]

    def to(self, dtype: torch.dtype) -> "Problem":
        """q, k and v in ``dtype``, and slopes and sinks in fp64 if they are; all detached."""
        options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in self.options.items()}
        if dtype == torch.float64:
            options = {n: x.double() if n in ("alibi_slopes", "sinks") else x for n, x in options.items()}
        return replace(self, **{n: getattr(self, n).detach().to(dtype) for n in "qkv"}, options=options)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        b, s, h, _ = self.q.shape
        return b, h, s

    def visible(self) -> Tensor:
        bounds = self.options.get("key_starts"), self.options.get("key_ends")
        return visible(*self.q.shape[:2], self.k.shape[1], self.mask, *bounds)

    def directions(self) -> tuple[Tensor, Tensor]:
        """Random gradients of the output and the LSE."""
        out = torch.randn(*self.q.shape[:3], self.v.shape[-1], dtype=self.q.dtype)
        return out, torch.randn(self.lse_shape, dtype=self.q.dtype)

    def largest_score(self, *, capped: bool = True) -> float:
        others = {"sinks", "dropout_p", "dropout_seed"} | ({"softcap"} if not capped else set())
        terms = {name: x for name, x in self.options.items() if name not in others}
        scores = eager_scores(self.q.detach().double(), self.k.detach().double(), mask=self.mask, **terms)
        return float(scores.detach().nan_to_num(0, 0, 0).abs().max()) if scores.numel() else 0.0

    def change(self, **changes: Any) -> "Problem":
        return replace(self, **changes)

    def solve(self, call=attention_with_lse, **more: Any) -> tuple[Tensor, Tensor]:
        return call(*self.tensors, mask=self.mask, **self.options, **more)

    def with_gradients(self, call, dout: Tensor, dlse: Tensor, **more: Any) -> dict[str, Tensor]:
        """out, lse, and the gradient of every leaf."""
        leaves = [x.requires_grad_() for x in self.leaves]
        out, lse = self.solve(call, **more)
        lost = dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0)
        total = (out * dout.to(out.dtype)).sum() + (lse.masked_fill(lse == -torch.inf, 0) * lost).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        names = [
            "dq",
            "dk",
            "dv",
            *(f"d{name}" for name in ("alibi_slopes", "sinks") if name in self.options),
        ]
        zeros = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True))
        return {"out": out.detach(), "lse": lse.detach()} | dict(zip(names, zeros, strict=True))


def assert_defined(problem: Problem, backend: str | None = None) -> None:
    """Output, LSE and gradients are those of eager attention, in fp64, where rounding cannot excuse
    anything.
    """
    problem = problem.to(torch.float64)
    dout, dlse = problem.directions()
    ours = problem.to(torch.float64).with_gradients(attention_with_lse, dout, dlse, backend=backend)
    golden = problem.to(torch.float64).with_gradients(eager, dout, dlse)
    for name, x in ours.items():
        torch.testing.assert_close(x, golden[name], msg=lambda text, name=name: f"{name}: {text}")


def assert_precise(problem: Problem, backend: str | None = None) -> None:
    """Our error against fp64 is at most twice (gradients: three times) that of eager torch at the same
    dtype.
    """
    dtype = problem.q.dtype
    dout, dlse = problem.directions()
    ours = problem.to(dtype).with_gradients(attention_with_lse, dout, dlse, backend=backend)
    naive = [problem.to(dtype).with_gradients(eager, dout, dlse, order=order) for order in (0, 1)]
    golden = problem.to(torch.float64).with_gradients(eager, dout.double(), dlse.double(), order=2)
    # Beside the result, every score and LSE is rounded once, in the dtype that scores are added up in.
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # The reference in fp64 rounds scores before the softcap just as much, but it may round them differently.
    score = problem.largest_score(capped=dtype != torch.float64)
    largest = max(score, float(golden["lse"].nan_to_num(0, 0, 0).abs().amax()))
    noise = torch.finfo(dtype).eps + 2 * wide * largest
    for name, x in ours.items():
        if name == "lse" and dtype != torch.float64:
            assert_lse(problem, x, golden["lse"])
        else:
            # A sink and a slope add up all rows with cancellation, and are so few that luck decides which is
            # nearer.
            few = name in ("dsinks", "dalibi_slopes")
            factor = 6 if few else 2 if name in ("out", "lse") else 3
            factor += dtype == torch.float64  # whose reference is no better than eager itself
            assert_close(
                name, x, [n[name] for n in naive], golden[name], factor, 32 * noise if few else noise
            )


def assert_lse(problem: Problem, ours: Tensor, golden: Tensor) -> None:
    """An LSE is added up in fp32 whatever the inputs."""
    assert ours.dtype == torch.float32
    assert_same_infinities("lse", ours, golden)
    finite = golden.isfinite()
    naive = problem.to(torch.float32).solve(eager)[1].detach()
    allowed = 2 * float((naive[finite] - golden[finite]).abs().max()) if finite.any() else 0
    # torch's fused attention takes a fast exp in half precision: 6.3e-5 off at worst (AVX2, torch 2.13).
    least = 1e-5 if problem.q.dtype == torch.float32 else 1e-4
    torch.testing.assert_close(ours.double(), golden, rtol=1e-5, atol=least + allowed)


def assert_close(
    name: str, ours: Tensor, naive: list[Tensor], golden: Tensor, factor: float, noise: float
) -> None:
    """The accuracy rule: worst element, mean, cosine and non-finite pattern."""
    assert ours.dtype == naive[0].dtype
    assert ours.shape == golden.shape
    assert_same_infinities(name, ours, golden)
    if not golden.numel():
        return
    finite = golden.isfinite() & torch.stack(naive).isfinite().all(0)
    exact = golden.masked_fill(~finite, 0)
    error, *allowed = ((x.double().masked_fill(~finite, 0) - exact).abs() for x in (ours, *naive))
    allowed = torch.stack(allowed).amax(0)
    noise = noise * exact.abs().max()
    where = tuple(int(x) for x in torch.unravel_index(error.argmax(), error.shape))
    limit = factor * allowed.max() + noise
    assert error.max() <= limit, (
        f"{name}{list(where)}: got {ours[where].item()!r}, expected {golden[where].item()!r}; "
        f"error {error.max():.3g} > {limit:.3g} ({factor} * {allowed.max():.3g} of eager + {noise:.3g})"
    )
    if exact.numel() < 64:
        return
    # All of the noise here too: under nearly uniform weights every dv is nearly one sum, with one error.
    limit = 0.75 * factor * allowed.mean() + noise
    assert error.mean() <= limit, f"{name}: mean error {error.mean():.3g} > {limit:.3g}"
    # Vectors that differ by a relative r have 1 - cos = r * r / 2.
    ours, exact = ours.double().masked_fill(~finite, 0).flatten(), exact.flatten()
    if exact.norm() > 0:
        difference = 1 - (ours @ exact) / (ours.norm() * exact.norm()).clamp_min(1e-300)
        limit = max(1e-5, float((factor * allowed.norm() / exact.norm()) ** 2))
        assert difference <= limit, f"{name}: cosine differs by {difference:.3g} > {limit:.3g}"


def assert_same_infinities(name: str, ours: Tensor, golden: Tensor) -> None:
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = (test(ours) != test(golden)).nonzero()
        assert not len(differs), f"{name}: {what} differs from the reference at {differs[:4].tolist()} ..."


def assert_same_bits(*pairs: tuple[Tensor, Tensor]) -> None:
    for n, (a, b) in enumerate(pairs):
        assert a.shape == b.shape
        where = (~((a == b) | (a.isnan() & b.isnan()))).nonzero()
        assert not len(where), f"pair {n}: bits differ at {where[:4].tolist()} ..."


def masks(extent: int = 70) -> st.SearchStrategy[Mask]:
    """Every kind of mask: unbounded, one-sided, windows, shifted and hollow bands, prefixes."""
    bound = st.integers(-extent, extent)
    return st.one_of(
        st.sampled_from((FULL, CAUSAL, sliding(1), sliding(5), CAUSAL.shift(-3), CAUSAL.shift(2))),
        st.builds(Mask, st.none() | bound, st.none() | bound),
        st.builds(Mask, st.none(), bound, st.integers(0, extent)),
    )


OPTIONS = ("scale", "softcap", "alibi_slopes", "per_sequence_slopes", "sinks", "bounds", "dropout")


def make_options(names, b: int, h: int, t: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments for the named options, drawn from torch's generator."""
    options: dict[str, Any] = {}
    for name in names:
        if name == "scale":
            options["scale"] = 0.3
        elif name == "softcap":
            options["softcap"] = 3.0
        elif name == "alibi_slopes":
            options["alibi_slopes"] = torch.rand(h, dtype=dtype)
        elif name == "per_sequence_slopes":
            options["alibi_slopes"] = torch.rand(b, h, dtype=dtype)
        elif name == "sinks":
            options["sinks"] = torch.randn(h, dtype=dtype)
        elif name == "bounds":
            options["key_starts"] = torch.randint(0, t // 2 + 1, (b,), dtype=torch.int32)
            options["key_ends"] = torch.randint(0, t + 1, (b,), dtype=torch.int32)
        elif name == "dropout":
            options |= {"dropout_p": 0.3, "dropout_seed": torch.tensor([1234567890123])}
    return options


def make(b, s, t, h, g, d, e=None, *, mask=CAUSAL, options=(), dtype=torch.float32, sigma=1.0) -> Problem:
    """A problem of these sizes from torch's generator."""
    e = d if e is None else e
    q, k, v = torch.randn(b, s, h, d) * sigma, torch.randn(b, t, g, d) * sigma, torch.randn(b, t, g, e)
    return Problem(q.to(dtype), k.to(dtype), v.to(dtype), mask, make_options(options, b, h, t))


@st.composite
def problems(
    draw,
    *,
    lengths=(0, 1, 2, 7, 17, 63, 65, 129),
    dtypes=(torch.float32,),
    options=OPTIONS,
    dims=(1, 5, 8, 16),
    heads=((1, 1), (2, 2), (3, 1), (6, 2), (5, 1)),
    mask=None,
) -> Problem:
    """Dense problems: odd sizes, any mask, any set of options; Sq below, at and above Sk."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    b, (h, g) = draw(st.integers(1, 3)), draw(st.sampled_from(heads))
    s, t = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    d = draw(st.sampled_from(dims))
    e = draw(st.sampled_from((d, 1, 11)))
    chosen = draw(st.sets(st.sampled_from(options))) if options else ()
    numbers = {"dtype": draw(st.sampled_from(dtypes)), "sigma": draw(st.sampled_from((0.1, 1.0, 10.0)))}
    return make(
        b, s, t, h, g, d, e, mask=draw(masks() if mask is None else mask), options=sorted(chosen), **numbers
    )
