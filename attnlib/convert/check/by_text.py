"""Show the loss of a conversion for each text that it was measured on."""

from collections.abc import Mapping
from typing import Any

TITLE = "by text, worst first:"


def lines_by_text(measures: Mapping[str, Any]) -> list[str]:
    """Return a table of the KL divergence and both perplexities of each text; empty for one text."""
    rows = measures.get("by_text", ())
    if not rows:
        return []
    width = max(len(TITLE), *(len(row["name"]) + 2 for row in rows))
    lines = [f"{TITLE:{width}}  KL, nats  perplexity before    after"]
    for row in rows:
        before, after = (shown(row[f"perplexity_{when}"]) for when in ("before", "after"))
        lines.append(f"  {row['name']:{width - 2}}  {_nats(row['kl_nats']):>8}  {before:>17}  {after:>7}")
    return lines


def shown(perplexity: float | None, infinite: str = "too large") -> str:
    """Return a perplexity as text; ``infinite`` if it is None, which stands for one above e^700."""
    if perplexity is None:
        return infinite
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.3g}"


def _nats(divergence: float) -> str:
    """Return a divergence with three decimals, or two digits if it is small."""
    return f"{divergence:.3f}" if divergence == 0 or not abs(divergence) < 0.01 else f"{divergence:.2g}"
