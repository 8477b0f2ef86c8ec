"""What attention counts as in torch's FlopCounterMode: as much as torch's own attention of the same shapes.

A query meets every key of its sequence, whatever the mask hides. Lengths are read where they are not fake.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from math import prod

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

COUNTER = "torch.utils.flop_counter"


def forward_flops(q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, *numbers, out_val=None) -> int:
    """Two products for each pair: the score over d, the output over e."""
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, numbers[-1]) * (q.shape[-1] + v.shape[-1])


def backward_flops(dout, dlse, out, lse, q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, *numbers, out_val=None):
    """Five: the score again, dq and dk over d, the probability's gradient and dv over e."""
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, numbers[-1]) * (3 * q.shape[-1] + 2 * v.shape[-1])


def cached_flops(q, k, v, k_tail, k_scale, v_scale, table, starts, lengths, cu_q, *rest, out_val=None) -> int:
    """As a forward over the keys that a sequence still stores; over a full table where lengths are fake."""
    if _unknown(lengths):
        pairs = prod(q.shape[:-2]) * table.shape[1] * k.shape[1]
    else:
        queries = q.shape[1] if cu_q is None else cu_q.diff()
        pairs = int(((lengths - starts).long().clamp(min=0) * queries).sum())
    return 2 * q.shape[-2] * pairs * (q.shape[-1] + (k if v is None else v).shape[-1])


def _pairs(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, longest: int | None) -> int:
    """Queries times keys, summed over the sequences; every sequence is the longest where offsets are fake."""
    if cu_q is None or _unknown(cu_q):
        return prod(q.shape[:-2]) * (k.shape[-3] if longest is None else longest)
    return int((cu_q.diff().long() * (cu_q if cu_k is None else cu_k).diff()).sum())


def _unknown(x: Tensor) -> bool:
    return x.is_meta or is_fake(x)


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
