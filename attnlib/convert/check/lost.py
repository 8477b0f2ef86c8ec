"""What a conversion lost: by the errors of its layers, and by what the result says of a text."""

from collections.abc import Mapping
from typing import Any

from ..checkpoint.verify import Errors
from ..latent.losses import BASELINE

LOSSLESS = 1e-6  # of every error that a converter reports; more than what fp32 rounds
NOTICED = 1e-3  # of a perplexity, relatively; less is said to be the same
RETURNS = (
    "fine-tuning usually returns most of that (in docs/conversion.md a small model with half of its KV heads "
    "came back to within 1 % of its bits a byte in 1,000 steps): "
    "python -m attnlib finetune {out} HEALED --teacher {source} --text FILE"
)


def nothing_lost(errors: Errors) -> bool:
    """Whether every error of every layer is no more than rounding to fp32."""
    found = [error for layer in errors.values() for error in own_errors(layer).values()]
    return bool(found) and all(error is not None and error < LOSSLESS for error in found)


def own_errors(errors: Mapping[str, float | None]) -> dict[str, float | None]:
    """A layer's errors without those of what it is compared with."""
    return {name: error for name, error in errors.items() if not name.startswith(BASELINE)}


def lost(measures: Mapping[str, Any], *, source: object = "SOURCE", out: object = "OUT") -> str | None:
    """A sentence on what was lost of a text, by the measures of a check, and what brings it back; None: not
    measured.

    ``source`` and ``out`` are the folders, as a command names them.
    """
    if "perplexity_before" not in measures:
        return None
    before, after = measures["perplexity_before"], measures["perplexity_after"]
    where = f"on {measures['tokens']:,} tokens of {measures['text']}"
    told = f"perplexity {_number(before)} before, {_number(after)} after {where}"
    if after is not None and before is not None and after <= before * (1 + NOTICED):
        return f"{told}: nothing that training would have to bring back"
    return f"{told}; {RETURNS.format(source=source, out=out)}"


def _number(perplexity: float | None) -> str:
    if perplexity is None:
        return "beyond all numbers"
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.3g}"
