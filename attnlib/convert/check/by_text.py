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
        before, after = (_shown(row[f"perplexity_{when}"]) for when in ("before", "after"))
        lines.append(f"  {row['name']:{width - 2}}  {row['kl_nats']:8.3f}  {before:>17}  {after:>7}")
    return lines


def _shown(perplexity: float | None) -> str:
    if perplexity is None:
        return "too large"
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.3g}"
