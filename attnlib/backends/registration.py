"""How torch comes to know the operators, and its FLOP counter their formulas."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

COUNTER = "torch.utils.flop_counter"


class Operator(NamedTuple):
    """An operator: its schema, what it runs, what it gives without values, and the FLOPs that it counts as."""

    schema: str
    run: Callable
    fake: Callable
    flops: Callable | None = None

    @property
    def name(self) -> str:
        """Its name in ``torch.ops.attnlib``."""
        return self.schema.partition("(")[0]


def register(*operators: Operator) -> torch.library.Library | None:
    """Make operators known to torch; keep what it returns.

    A second copy of the package in one process runs those of the first. torch's FLOP counter imports Triton, so it
    gets the formulas only where somebody has imported it; who does so later passes ``attnlib.FLOP_FORMULAS``.

    Raises:
        ImportError: the operators in this process are of another version.
    """
    namespace = torch.ops.attnlib
    schemas = {operator.name: operator.schema for operator in operators}
    known = getattr(namespace, "schemas", {})
    if hasattr(namespace, next(iter(schemas))):
        for name, schema in schemas.items():
            if known.get(name) != schema:
                raise ImportError(f"attnlib: another version is loaded in this process, with another operator {name}")
        return None
    namespace.schemas = known | schemas
    library = torch.library.Library("attnlib", "FRAGMENT")
    for operator in operators:
        library.define(operator.schema)
        for device in ("CPU", "CUDA"):
            library.impl(operator.name, operator.run, device)
        torch.library.register_fake(f"attnlib::{operator.name}", operator.fake, lib=library)
        if operator.flops is not None and COUNTER in sys.modules:
            count = sys.modules[COUNTER].register_flop_formula
            count(getattr(namespace, operator.name), get_raw=True)(operator.flops)
    return library
