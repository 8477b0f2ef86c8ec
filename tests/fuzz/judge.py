"""Whether results are those of the oracle: the rule for errors, and the same infinities and NaN.

A NaN of a sequence may also be where the oracle has a number, in rows and keys of that sequence and KV head:
what a mask hides inside a sequence may be multiplied by zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Rule, Sequence, attend, magnitudes

Tensors = dict[str, Tensor]


class Mismatch(AssertionError):
    """The library's result is not the oracle's."""


@dataclass
class Question:
    """What the oracle is asked: tensors, of which ``cut`` makes sequences, and how their answers lie in the
    result.

    ``join`` puts together what there is of each sequence, ``[s, h, *]`` for rows and ``[h, s]`` for the LSE.
    ``eps`` is the precision of what is computed with, 0 for that of ``dtype``.
    """

    tensors: Tensors
    rule: Rule
    dtype: torch.dtype
    cut: Callable[[Tensors], list[Sequence]]
    join_rows: Callable[[list[Tensor]], Tensor]
    join_lse: Callable[[list[Tensor]], Tensor]
    eps: float = 0.0

    def solve(self, wide: torch.dtype, directions: Tensors, leaves: list[str], **precision) -> Tensors:
        """out, lse, and the gradients of ``leaves`` in the ``directions``."""
        tensors = {
            name: x.detach().to(wide).requires_grad_(name in leaves) for name, x in self.tensors.items()
        }
        answers = [attend(x, self.rule, **precision) for x in self.cut(tensors)]
        found = {
            "out": self.join_rows([out for out, _ in answers]),
            "lse": self.join_lse([lse for _, lse in answers]),
        }
        found |= gradients(found, directions, {name: tensors[name] for name in leaves})
        return {name: x.detach() for name, x in found.items()}


def gradients(found: Tensors, directions: Tensors, leaves: Tensors) -> Tensors:
    """The gradient of each leaf, ``d`` before its name; what depends on none of them adds nothing."""
    asked = {name: x.to(found[name].dtype) for name, x in directions.items() if found[name].requires_grad}
    grads = [torch.zeros_like(x) for x in leaves.values()]
    if asked and leaves:
        outputs = [found[name] for name in asked]
        given = list(asked.values())
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), given, allow_unused=True, materialize_grads=True
        )
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


@torch.enable_grad()
def judge(
    question: Question, ours: Tensors, directions: Tensors | None = None, leaves: list[str] | None = None
) -> None:
    """Raise Mismatch unless ``ours`` (out, lse, and gradients such as dq) are what the oracle says.

    Errors against fp64 are at most twice those of eager attention in the dtype under test, gradients' three
    times, and one rounding of every term that is added up; on the mean likewise.
    """
    directions, leaves = directions or {}, leaves or []
    wide = torch.float64 if question.dtype == torch.float64 else torch.float32
    golden = question.solve(torch.float64, directions, leaves)
    low = None if question.dtype == wide else question.dtype
    naive = [question.solve(wide, directions, leaves, stored=low, backwards=side) for side in (False, True)]
    sizes, largest, terms = _sizes(question, golden, directions)
    eps = max(question.eps, torch.finfo(question.dtype).eps)
    # Every score is rounded where its terms are; a sum of n like terms errs by n / 8 units in its last place.
    rounding = (4 + 4 * largest + terms / 8) * max(question.eps, torch.finfo(wide).eps)
    rounding *= 4 if question.dtype == torch.float64 else 1  # in which the oracle computes too
    unsure = _unsure(question)
    for name, mine in ours.items():
        exact, eager = golden[name], [x[name] for x in naive]
        _same_kind(name, mine, exact, question, wide, unsure[name] & mine.isnan())
        if name == "lse":
            # A fast exp is good enough for weights of half precision, and moves the LSE by 6e-5 at most.
            noise = rounding * (1 + exact.nan_to_num(0, 0, 0).abs()) + (0 if low is None else 1e-4)
        else:
            leaf = question.tensors.get(name[1:], mine)
            stored = torch.finfo(leaf.dtype)
            noise = (max(eps, stored.eps) + rounding) * sizes[name] + stored.smallest_normal * stored.eps
        _close(name, mine, exact, eager, 2 if name in ("out", "lse") else 3, noise)


def _sizes(question: Question, golden: Tensors, directions: Tensors) -> tuple[Tensors, float, int]:
    """The magnitudes of all results but the LSE, each in its place, the terms of the largest score, and the
    most terms of any sum."""
    tensors = {name: x.detach().double().requires_grad_() for name, x in question.tensors.items()}
    sequences = question.cut(tensors)
    outs = [x.q.new_zeros(*x.q.shape[:2], x.v.shape[-1], requires_grad=True) for x in sequences]
    lses = [x.q.new_zeros(x.q.shape[1], len(x.q), requires_grad=True) for x in sequences]
    douts = _pieces(question.join_rows, outs, directions.get("out"))
    dlses = _pieces(question.join_lse, lses, directions.get("lse"))
    with torch.no_grad():
        found = [
            magnitudes(x, question.rule, dout, dlse)
            for x, dout, dlse in zip(sequences, douts, dlses, strict=True)
        ]
    # The gradient of a sum of products puts each sequence's factors where its tensors came from.
    total = sum((x.sum() * 0 for x in tensors.values()), torch.zeros(()))
    for x, (sizes, _) in zip(sequences, found, strict=True):
        parts = {"dq": x.q, "dk": x.k, "dv": x.v, "dalibi_slopes": x.slopes, "dsinks": x.sinks}
        total = total + sum((part * sizes[name]).sum() for name, part in parts.items() if part is not None)
    placed = torch.autograd.grad(total, list(tensors.values()))
    sizes = {f"d{name}": size for name, size in zip(tensors, placed, strict=True)}
    sizes["out"] = question.join_rows([size["out"] for size, _ in found])
    terms = max((max(len(x.q) * x.q.shape[1], len(x.k), x.q.shape[2]) for x in sequences), default=0)
    return sizes, max((largest for _, largest in found), default=0.0), terms


def _pieces(join: Callable, parts: list[Tensor], direction: Tensor | None) -> list[Tensor]:
    """What of a gradient of the whole belongs to each part."""
    if direction is None or not parts:
        return [torch.zeros_like(part) for part in parts]
    direction = direction.double().nan_to_num(0, 0, 0)
    return list(torch.autograd.grad(join(parts), parts, direction, materialize_grads=True, allow_unused=True))


def _unsure(question: Question) -> Tensors:
    """Where a result may be NaN though the oracle has a number, bool in the shape of each result."""
    tensors = {name: x.detach().double().requires_grad_() for name, x in question.tensors.items()}
    sequences = question.cut(tensors)
    heads = [x.unsure(question.rule).double() for x in sequences]
    # The gradient of a sum puts each sequence's ones where its tensors came from.
    total = sum((x.sum() * 0 for x in tensors.values()), torch.zeros(()))
    outs, lses = [], []
    for x, of_head in zip(sequences, heads, strict=True):
        s, h, _ = x.q.shape
        of_kv_head = of_head.unflatten(0, (x.k.shape[1], -1))[:, 0, None]
        outs.append(of_head[:, None].expand(s, h, x.v.shape[-1]))
        lses.append(of_head[:, None].expand(h, s))
        for y in (x.k, x.v):
            total = total + (y * of_kv_head).sum()
        for y, ones in ((x.q, of_head[:, None]), (x.slopes, of_head), (x.sinks, of_head)):
            total = total if y is None else total + (y * ones).sum()
    placed = torch.autograd.grad(total, list(tensors.values()))
    found = {"out": question.join_rows(outs), "lse": question.join_lse(lses)}
    found |= {f"d{name}": x for name, x in zip(tensors, placed, strict=True)}
    return {name: x > 0 for name, x in found.items()}


def _same_kind(
    name: str, ours: Tensor, exact: Tensor, question: Question, wide: torch.dtype, excused: Tensor
) -> None:
    dtype = wide if name == "lse" else question.tensors[name[1:]].dtype if name != "out" else question.dtype
    if ours.dtype != dtype or ours.shape != exact.shape:
        raise Mismatch(f"{name}: expected {dtype} {tuple(exact.shape)}, got {ours.dtype} {tuple(ours.shape)}")
    sure = ~(exact.isfinite() & (exact.abs() > 0.9 * torch.finfo(dtype).max))  # what may round to infinity
    sure &= ~excused
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = ((test(ours) != test(exact)) & sure).nonzero()
        if len(differs):
            at = tuple(differs[0].tolist())
            raise Mismatch(
                f"{name}: {what} differs at {len(differs)} places of {tuple(exact.shape)}, first {list(at)}: "
                f"got {ours[at].item()!r}, expected {exact[at].item()!r}"
            )


def _close(name: str, ours: Tensor, exact: Tensor, eager: list[Tensor], factor: int, noise: Tensor) -> None:
    finite = exact.isfinite() & ours.isfinite() & torch.stack(eager).isfinite().all(0)
    if not finite.any():
        return
    error, *allowed = ((x.double() - exact).abs()[finite] for x in (ours, *eager))
    noise, worst = noise[finite], torch.stack(allowed).amax(0)
    over = error - noise - factor * worst.max()
    if not (over <= 0).all():
        at = tuple(finite.nonzero()[over.argmax()].tolist())
        raise Mismatch(
            f"{name}{list(at)} of {tuple(exact.shape)}: got {ours[at].item()!r}, expected "
            f"{exact[at].item()!r}; error {error[over.argmax()]:.3g} > {factor} * {worst.max():.3g} of eager "
            f"+ {noise[over.argmax()]:.3g}"
        )
    if error.mean() > 0.75 * factor * worst.mean() + noise.mean():
        raise Mismatch(
            f"{name}: mean error {error.mean():.3g} > {0.75 * factor} * {worst.mean():.3g} of eager "
            f"+ {noise.mean():.3g}"
        )
