"""Largest scores and probabilities of dense and packed calls in Triton: the operator and its launches."""

import torch
from torch import Tensor

from ....call.call import Call
from ....call.statistic import Statistic
from ....internal.watched import are_watched
from ...autograd import register_statistic
from ...operators import flat_statistic, readable, statistic_of
from ..functions.programs import captured
from ..launching.config import LaunchConfig
from ..launching.launch import Block, Launch, cached_plan
from ..launching.layouts import Key, key_of
from . import hopper as variants
from . import mask_tiles, tables
from .shapes import DenseShapes

CONVERTED = LaunchConfig(1024, 0, 1, 4)  # the blocks of `convert_lse`
Plan = tuple[tuple[Launch, ...], int]  # launches in order, and the size of the buffer `lists`


class Statistics:
    """The operator that computes quantities from the scores of a call, registered under ``name``."""

    def __init__(self, name: str):
        self.name = name
        self._library = register_statistic(name, self._run)

    def statistic(self, call: Call, wanted: Statistic) -> Tensor:
        """Return a statistic of a dense or packed call."""
        if are_watched(call.q, call.k, call.v):
            run = getattr(torch.ops.attnlib, f"{self.name}_statistic").default
        else:
            run = self._run
        return run(*flat_statistic(call, wanted))

    def _run(self, *arguments):
        a, wanted = statistic_of(arguments)
        a = readable(a)
        result = wanted.result(a.q, a.k)
        if wanted.kind == "rows":
            result.zero_()  # kernels write only the columns of keys
        key = key_of(a, a.q, a.k)
        tensors = {"result": result, "lists": None}
        for name, x in (("lse", wanted.lse), ("rows", wanted.rows), ("at", wanted.at)):
            tensors[name] = None if x is None else x.contiguous()
        if wanted.lse is not None:
            tensors["lse2"] = result.new_empty(wanted.lse.shape)
        if not result.numel():
            return result
        walks = wanted.kind == "maxima" or (wanted.kind == "mass" and wanted.rows is None)
        if walks and a.mask_program is not None and a.mask_tiles is None:
            launch, shape = variants.states(key)
            dtype = torch.int8 if a.mask_tree is None else torch.int32
            a = a._replace(mask_tiles=a.q.new_empty(shape, dtype=dtype))
            launch.on(a._asdict() | captured(a) | {"states": a.mask_tiles, "lengths": None})
        launches, numbers = plan(key, wanted.kind, *_sizes(wanted))
        tensors |= {"states": a.mask_tiles}
        if numbers:
            tensors["lists"] = a.q.new_empty(numbers, dtype=torch.int32)
        for launch in launches:
            launch.on(a._asdict() | captured(a) | tensors)
        return result


def _sizes(wanted: Statistic) -> tuple[bool, int, bool, int]:
    """Return what else a plan depends on: if there are rows, their number, if sequences differ, the width."""
    given = wanted.rows if wanted.at is None else wanted.at
    if given is None:
        return False, 0, False, 0
    return wanted.rows is not None, given.shape[-1], given.dim() == 2, wanted.width


@cached_plan
def plan(key: Key, kind: str, has_rows: bool, slots: int, by_sequence: bool, width: int) -> Plan:
    """Return the launches of a statistic of this kind; ``slots`` is the number of rows, or of keys ``at``."""
    x = DenseShapes(key)
    if kind == "maxima":
        return _maxima(x)
    if kind == "heads":
        launches, numbers = _means(x, slots), 0
    elif has_rows:
        launches, numbers = _rows(x, slots, slots if by_sequence else 0, None if kind == "mass" else width), 0
    else:
        launches, numbers = _mass(x)
    return (_converted(x), *launches), numbers


def _converted(x: DenseShapes) -> Launch:
    from ..kernels.statistics import convert_lse

    rows = (1 if x.packed else x.batch) * x.h * x.s
    return x.launch(convert_lse, -(-rows // CONVERTED.block_m), CONVERTED, {"rows": rows})


def _maxima(x: DenseShapes) -> Plan:
    from ..kernels.statistics import maxima

    tiles = tables.maxima(x.case, keys=x.length)
    if x.states is None:
        return (x.launch_by_blocks(maxima, tiles),), 0
    found = mask_tiles.lists(x, tiles, by_keys=False)
    return (found.launch, x.launch_by_blocks(maxima, tiles, found.arguments)), found.numbers


def _mass(x: DenseShapes) -> Plan:
    from ..kernels.statistics import mass

    tiles = tables.mass(x.case, keys=x.length)
    if x.states is None:
        return (_by_keys(x, mass, tiles, {}),), 0
    found = mask_tiles.lists(x, tiles, by_keys=True, group=1)
    return (found.launch, _by_keys(x, mass, tiles, found.arguments)), found.numbers


def _rows(x: DenseShapes, slots: int, stride: int, width: int | None) -> tuple[Launch]:
    """Return the launch for ``slots`` rows; ``stride`` is their distance between sequences, or 0.

    Without a ``width``, the rows are summed.
    """
    from ..kernels.statistics import row_weights

    more = {"slots": slots, "stride_rows": stride, "SUM": width is None, "columns": width or 0}
    if width is not None:
        more |= {"stride_rb": 0 if x.packed else x.h * slots * width, "stride_rh": slots * width}
    return (_by_keys(x, row_weights, tables.row_weights(x.case), more),)


def _by_keys(x: DenseShapes, kernel, tiles: LaunchConfig, more: dict) -> Launch:
    """Return a launch with a program per query head and block of keys."""
    pairs, wave = x.waves(x.h)
    blocks = {}
    if tiles.tma:
        blocks = {"q_desc": Block("q", tiles.block_m, x.main)}
        blocks |= {"q_tail_desc": Block("q", tiles.block_m, x.tail)} if x.tail else {}
    sums = {"stride_rb": 0 if x.packed else x.h * x.t, "stride_rh": x.t, "heads_per_wave": wave}
    return x.launch(kernel, pairs * x.blocks(x.t, tiles.block_n), tiles, sums | more, blocks)


def _means(x: DenseShapes, slots: int) -> tuple[Launch]:
    from ..kernels.statistics import mean_weights

    tiles = tables.mean_weights(x.case, group=x.h // x.g)
    queries = x.s + x.batch + 1 if x.packed else x.batch * x.s
    return (x.launch(mean_weights, queries * -(-slots // tiles.block_n), tiles, {"slots": slots}),)
