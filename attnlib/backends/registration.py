"""How torch comes to know the operators, and its FLOP counter their formulas."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

COUNTER = "torch.utils.flop_counter"


class Operator(NamedTuple):
    """An operator: its schema, what it runs, what it gives without values, and the FLOPs that it counts as.

    ``gradients`` and ``keep``, which saves what they need, are as ``torch.library.register_autograd`` takes
    them; ``vmap`` is its rule under vmap, and takes the operator first.
    """

    schema: str
    run: Callable[..., object]
    fake: Callable[..., object]
    flops: Callable[..., int] | None = None
    gradients: Callable[..., object] | None = None
    keep: Callable[..., None] | None = None
    vmap: Callable[..., object] | None = None


def register(*operators: Operator) -> torch.library.Library | None:
    """Make operators known to torch; keep what it returns.

    A second copy of the package in one process runs those of the first. torch's FLOP counter imports Triton,
    so it gets the formulas only where somebody has imported it; who does so later passes
    ``attnlib.FLOP_FORMULAS``.

    Raises:
        ImportError: the operators in this process are of another version.
    """
    namespace = torch.ops.attnlib
    schemas = {operator.schema.partition("(")[0]: operator.schema for operator in operators}
    known = getattr(namespace, "schemas", {})
    if hasattr(namespace, next(iter(schemas))):
        for name, schema in schemas.items():
            if known.get(name) != schema:
                raise ImportError(
                    f"attnlib: another version is loaded in this process, with another operator {name}"
                )
        return None
    namespace.schemas = known | schemas
    library = torch.library.Library("attnlib", "FRAGMENT")
    for name, operator in zip(schemas, operators, strict=True):
        library.define(operator.schema)
        made, path = getattr(namespace, name), f"attnlib::{name}"
        for device in ("CPU", "CUDA"):
            library.impl(name, operator.run, device)
        torch.library.register_fake(path, operator.fake, lib=library)
        if operator.gradients is not None:
            torch.library.register_autograd(
                path, operator.gradients, setup_context=operator.keep, lib=library
            )
        if operator.vmap is not None:
            torch.library.register_vmap(path, partial(operator.vmap, made.default), lib=library)
        if operator.flops is not None and COUNTER in sys.modules:
            sys.modules[COUNTER].register_flop_formula(made, get_raw=True)(operator.flops)
    return library
