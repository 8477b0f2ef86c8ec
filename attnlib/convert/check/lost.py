"""Decide from layer errors if a conversion lost quality, and describe the loss by perplexities and KL."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from ..checkpoint.verify import Errors
from ..latent.losses import BASELINE
from .by_text import shown

WINDOW = 4  # index branches are trained on sequences of this many times the keys that they choose
LOSSLESS = 1e-6  # all layer errors below this count as fp32 rounding, so nothing was lost
# A relative increase of the perplexity above this counts as a loss, and so does a KL divergence above it in
# nats: the perplexity alone may stay, or even fall, while the predictions change.
NOTICED = 1e-3
RETURNS = (
    "fine-tuning usually recovers most of the loss (in docs/conversion.md a small model with half of its KV "
    "heads came back to within 1 % of its bits per byte in 1,000 steps):\n"
)


def nothing_lost(errors: Errors) -> bool:
    """True if layer errors were measured and none exceeds fp32 rounding."""
    found = [error for layer in errors.values() for error in own_errors(layer).values()]
    return bool(found) and all(error is not None and error < LOSSLESS for error in found)


def own_errors(errors: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the errors of a layer's conversion, without the baseline errors to compare them with."""
    return {name: error for name, error in errors.items() if not name.startswith(BASELINE)}


def lost(
    measures: Mapping[str, Any],
    *,
    source: object = "SOURCE",
    out: object = "OUT",
    texts: Sequence[object] = ("FILE",),
    has_links: bool = False,
    keys: int | None = None,
) -> str | None:
    """Return a line about the perplexity before and after; None if no perplexity was measured.

    If quality was lost, a second line has a command for fine-tuning, to copy into a shell. ``source``,
    ``out`` and ``texts`` are the paths in it. A source that ``has_links`` is copied without links first,
    because finetune accepts none. If there are new index branches, which choose ``keys`` keys for a query,
    the command trains them, and is always there.
    """
    command = _command(source, out, texts, has_links=has_links)
    if keys is not None:
        command += f" --context {WINDOW * keys}"
    if "perplexity_before" not in measures:
        return None if keys is None else f"{_chosen(keys)}\n{command}"
    before, after = measures["perplexity_before"], measures["perplexity_after"]
    where = f"on {measures['tokens']:,} tokens of {measures['text']}"
    numbers = [shown(x, "too large to compute") for x in (before, after)]
    line = f"perplexity {numbers[0]} before, {numbers[1]} after {where}"
    if keys is not None:
        return f"{line}\n{_chosen(keys)}\n{command}"
    if after is not None and before is not None and after <= before * (1 + NOTICED):
        if measures["kl_nats"] <= NOTICED:
            return f"{line}: no loss to recover by fine-tuning"
        line += f", but a KL divergence of {measures['kl_nats']:.3g} nats from the source"
    return f"{line}; {RETURNS}{command}"


def _chosen(keys: int) -> str:
    """Return the line about new index branches that choose this number of keys for each query."""
    return (
        f"new index branches choose {keys:,} keys of longer texts at random, until fine-tuning trains them:"
    )


def _command(source: object, out: object, texts: Sequence[object], *, has_links: bool) -> str:
    """Return the command that fine-tunes ``out``, with paths quoted for a shell."""
    copied = f"{source}-files"
    copy = f"cp -rL {quote(str(source))} {quote(copied)} && " if has_links else ""
    teacher, healed = quote(copied if has_links else str(source)), quote(f"{out}-healed")
    return (
        f"  {copy}python -m attnlib finetune {quote(str(out))} {healed} --teacher {teacher} "
        f"--text {' '.join(quote(str(text)) for text in texts)}"
    )
