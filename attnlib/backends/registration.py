"""How torch comes to know the operators, and its FLOP counter their formulas."""

import sys
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder

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


def count(formulas: list[tuple[object, Callable]]) -> None:
    """Give torch's counter formulas of operators, ``(operator, formula)``.

    The counter imports Triton, so it is not imported here: if nobody has yet, it gets them when somebody does.
    """
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER], formulas)
    else:
        sys.meta_path.insert(0, _AfterImport(formulas))


def _register(counter, formulas: list[tuple[object, Callable]]) -> None:
    for operator, formula in formulas:
        counter.register_flop_formula(operator, get_raw=True)(formula)


class _AfterImport(MetaPathFinder):
    """Finds the counter as the finders after this one do, and registers formulas as soon as it is loaded."""

    def __init__(self, formulas: list[tuple[object, Callable]]):
        self.formulas = formulas

    def find_spec(self, fullname, path, target=None):
        """The module's spec, whose loader then registers; None for every other module."""
        if fullname != COUNTER:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _register(module, self.formulas)

            spec.loader.exec_module = exec_module
        return spec
