"""Rewrite the Python argument names in an error message as command-line options."""

import re
from types import MappingProxyType

OPTIONS = MappingProxyType(
    {
        "num_kv_heads": "--kv-heads",
        "kv_heads": "--kv-heads",
        "merge": "--merge",
        "align": "--align",
        "grouping": "--grouping",
        "rank": "--rank",
        "rope_dim": "--rope-dim",
        "q_rank": "--q-rank",
        "norm": "--norm",
        "cache": "--cache",
        "layers": "--layers",
        "reach": "--reach",
        "samples": "--samples",
        "length": "--length",
        "max_shard_size": "--max-shard-size",
        "allow_nonfinite": "--allow-nonfinite",
        "overwrite": "--overwrite",
        "out": "OUT",
    }
)
NAMES = "|".join(OPTIONS)
# A user of the command cannot follow advice for users of the Python functions.
PYTHON_ADVICE = re.compile(r'\b(?:gqa_to_mla|mha_to_gqa) or (?=--)| or "?learned"?(?= without align)')
QUOTED = re.compile(r"""(?<![\w'"])(['"])([^'"\s]+)\1(?![\w'"])""")


def in_options(message: str) -> str:
    """Rewrite ``rank: ...`` as ``--rank: ...``, ``merge="mean"`` as ``--merge mean``, and so on.

    >>> in_options('num_kv_heads: expected 2, got 3; use align="values" or overwrite=True')
    '--kv-heads: expected 2, got 3; use --align values or --overwrite'
    >>> in_options("expected 'none', got 'gpt2'; use gqa_to_mla or --to attnlib")
    'expected none, got gpt2; use --to attnlib'
    """
    message = PYTHON_ADVICE.sub("", message)
    start = rf"^(?:--to \w+: )?((?:layer [0-9]+: )?)({NAMES})(?=: )"
    message = re.sub(start, lambda found: found[1] + OPTIONS[found[2]], message)
    message = re.sub(rf"\b({NAMES})=True\b", lambda found: OPTIONS[found[1]], message)
    message = re.sub(
        rf"""\b({NAMES})=['"]?([\w-]+)['"]?""", lambda found: f"{OPTIONS[found[1]]} {found[2]}", message
    )
    return without_quotes(message)


def without_quotes(message: str) -> str:
    """Remove the quotes around single words, which Python's repr puts there.

    >>> without_quotes("got 'bert'; Alice's 'two words'")
    "got bert; Alice's 'two words'"
    """
    return QUOTED.sub(r"\2", message)


def option(name: str) -> str:
    """Return the command-line option for an argument's name."""
    return f"--{name.replace('_', '-')}"
