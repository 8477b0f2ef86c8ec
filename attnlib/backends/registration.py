"""Registration of operators with torch, and of their FLOP formulas with torch's FLOP counter."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

COUNTER = "torch.utils.flop_counter"


class Operator(NamedTuple):
    """A torch operator: its schema, implementation, fake implementation and FLOP formula.

    ``gradients`` and ``keep`` are passed to ``torch.library.register_autograd`` as ``backward`` and
    ``setup_context``. ``vmap`` runs the operator under vmap; its first argument is the operator.
    """

    schema: str
    run: Callable[..., object]
    fake: Callable[..., object]
    flops: Callable[..., int] | None = None
    gradients: Callable[..., object] | None = None
    keep: Callable[..., None] | None = None
    vmap: Callable[..., object] | None = None


def register(*operators: Operator) -> torch.library.Library | None:
    """Register operators with torch, and return their library, which the caller must keep alive.

    If a process loads a second copy of the package, that copy gets None, and uses the operators of the first.
    Importing torch's FLOP counter also imports Triton, so the counter gets the formulas only if it is already
    imported. A program that imports the counter later can pass it ``attnlib.FLOP_FORMULAS``.

    Raises:
        ImportError: the operators in this process belong to another version.
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
