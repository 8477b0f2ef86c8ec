"""How torch comes to know the operators, and its FLOP counter their formulas."""

import sys
from collections.abc import Callable, Iterable

import torch

COUNTER = "torch.utils.flop_counter"


def register(operators: Iterable[tuple[str, Callable, Callable, Callable | None]]) -> torch.library.Library | None:
    """Make operators, ``(schema, implementation, fake, FLOP formula)``, known to torch; keep what it returns.

    A second copy of the package in one process runs those of the first.
    """
    operators = list(operators)
    names = [schema.partition("(")[0] for schema, *_ in operators]
    if hasattr(torch.ops.attnlib, names[0]):
        for name, (schema, *_) in zip(names, operators, strict=True):
            known = str(getattr(torch.ops.attnlib, name).default._schema)
            if known != str(torch._C.parse_schema(f"attnlib::{schema}")):
                raise ImportError(f"attnlib: another version is loaded in this process, with the operator {known}")
        return None
    library = torch.library.Library("attnlib", "FRAGMENT")
    counted = []
    for name, (schema, run, fake, flops) in zip(names, operators, strict=True):
        library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, run, device)
        torch.library.register_fake(f"attnlib::{name}", fake, lib=library)
        if flops is not None:
            counted.append((getattr(torch.ops.attnlib, name), flops))
    count(counted)
    return library


def count(formulas: Iterable[tuple[object, Callable]]) -> None:
    """Give torch's counter formulas of operators, ``(operator, formula)``, if somebody has imported it.

    It imports Triton, so it is not imported here; who imports it later passes ``attnlib.FLOP_FORMULAS``.
    """
    if COUNTER in sys.modules:
        for operator, formula in formulas:
            sys.modules[COUNTER].register_flop_formula(operator, get_raw=True)(formula)
