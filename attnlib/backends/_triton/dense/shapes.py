"""Shapes of calls without a cache, with methods that make the launches of their kernels."""

import math
from collections.abc import Callable

from ....call.spec import arch_of
from ....masks.function import TreeTensors
from ....tracing.program import Program
from ...operators import result_dtype
from ..functions.programs import bounds, derivatives, functions
from ..launching.config import LaunchConfig, widths
from ..launching.launch import Block, Launch
from ..launching.layouts import Key, Layout, contiguous, has_slopes, hides_nothing, is_plain, scoring, strides
from . import tables

PREPARED = LaunchConfig(32, 0, 1, 4)  # tiles of `prepare`, the first backward kernel; it reads no keys


class DenseShapes:
    """The shapes of a forward call, with methods that make the launches of its kernels."""

    def __init__(self, key: Key):
        a = key.layouts
        (self.s, self.h, d), (self.t, self.g), e = a.q.shape[-3:], a.k.shape[-3:-1], a.v.shape[-1]
        self.packed = a.cu_seqlens_q is not None
        self.batch = a.cu_seqlens_q.shape[0] - 1 if self.packed else a.q.shape[0]
        # The number of keys per sequence; for packed sequences, the mean.
        self.length = self.t // max(1, self.batch) if self.packed else self.t
        self.case = tables.DenseCase(
            d, e, a.q.dtype.itemsize, causal=a.right is not None, arch=arch_of(key.device),
            plain=is_plain(a),
            aligned=key.aligned and all(x.is_in_lines for x in (a.q, a.k, a.v)),
            by_function=not (a.mask_program is a.score_program is None), changed=a.score_program is not None,
            exponentials=0 if a.score_program is None else Program(a.score_program).exponentials,
            gathers=sum(Program(x).gathers for x in (a.mask_program, a.score_program) if x is not None),
        )  # fmt: skip
        for name, x in (("q", a.q), ("k", a.k), ("v", a.v)):
            if x.strides[-3] >= tables.FARTHEST:
                apart = f"rows of {name} lie {x.strides[-3]} elements apart"
                raise NotImplementedError(f"triton: {apart}; call .contiguous()")
        # True if all blocks of queries see the same number of keys.
        self.are_alike = hides_nothing(a) and not self.packed
        # True if sequences may differ in their key bounds or in their origins (positions in a larger call).
        self.bounded = not (a.key_starts is a.key_ends is a.origin is None)
        self.bounds = bounds(a, self.batch, self.h, self.s + self.t)
        self.tree = None if a.mask_tree is None else TreeTensors.read(a.mask_tree)
        self.states = (
            None if a.mask_program is None else self._states(Program(a.mask_program), a.origin is not None)
        )
        # True if the values are the first channels of the keys, in a call with lists of selected keys.
        self.own_values = not (key.same_start and e <= d and a.k.strides == a.v.strides)
        # The shape of lists of selected keys, and the size of their blocks.
        self.selected = None if a.selected is None else (a.selected.shape, a.block_size)
        self.main, self.tail, self.value = main, tail, value = widths(d, e)
        self.out = contiguous((*a.q.shape[:-1], e), result_dtype(a.q.dtype))
        self._arguments = {
            **strides("bshd", q=a.q, o=self.out), **strides("btgd", k=a.k, v=a.v),
            "stride_lb": 0 if self.packed else self.h * self.s, "stride_lh": self.s,
            "batch": self.batch, "heads": self.h, "kv_heads": self.g, "s": self.s, "t": self.t,
            "group": self.h // self.g, "GROUP": self.h // self.g, **scoring(a, self.h, self.s + self.t),
            "threshold": math.ceil(a.dropout_p * 2**32), "dropout_scale": 1 / (1 - a.dropout_p),
            "D": d, "D_MAIN": main, "D_TAIL": tail, "E": e, "E_MAIN": value,
            "PRECISION": "tf32" if key.tf32 else "ieee", **functions(a, self.bounds),
            "DK": True, "DV": True,
            "room": None, "stride_list_b": None, "stride_list_h": None,  # set only with a mask function
        }  # fmt: skip

    def _states(self, program: Program, has_origin: bool) -> tuple[int, int, int, int]:
        """Return the shape ``[sequences, heads, rows, columns]`` of the classified tiles of a mask function.

        A dimension is 1 if all sequences, or all heads, have the same mask. For a tree, the third dimension
        has bounds of ends, and of depths if it has a window, and the fourth one the tiles of keys.
        """
        read = program.read
        sequences = self.batch if not self.packed and ("b" in read or has_origin) else 1
        heads = self.h if "h" in read else 1
        if self.tree is not None:
            return sequences, 1, 2 if self.tree.reach is None else 4, self.blocks(self.t, tables.GRAIN)
        return sequences, heads, self.blocks(self.s, tables.GRAIN), -(-self.t // tables.GRAIN)

    def blocks(self, length: int, block: int) -> int:
        """Return the number of blocks per sequence, or the most in all sequences together if they are packed.

        Every packed sequence may end with a partial block.
        """
        return length // block + self.batch + 1 if self.packed else -(-length // block)

    def waves(self, heads: int, cache: int = tables.L2) -> tuple[int, int]:
        """Return the number of (sequence, head) pairs, and how many of them run together."""
        pairs, group = heads if self.packed else self.batch * heads, heads // self.g
        if self.packed:
            return pairs, pairs
        return pairs, tables.heads_per_wave(self.case, keys=self.t, pairs=pairs, group=group, cache=cache)

    def launch(
        self,
        kernel: Callable,
        programs: int,
        config: LaunchConfig,
        more: dict | None = None,
        blocks: dict[str, Block] | None = None,
        *,
        early: bool = False,
    ) -> Launch:
        """Return the launch of a kernel on this call; ``more`` adds or replaces arguments by name."""
        return Launch(kernel, programs, self._arguments | (more or {}), config, blocks, early=early)

    def launch_by_blocks(
        self, kernel: Callable, tiles: LaunchConfig, more: dict | None = None, *, of_keys: bool = False
    ) -> Launch:
        """Return a launch with a program per head and block of queries, or per KV head and block of keys."""
        heads, length, block, loaded = self.h, self.s, tiles.block_m, tiles.block_n
        if of_keys:
            heads, length, block, loaded = self.g, self.t, tiles.block_n, tiles.block_m
        pairs, wave = self.waves(heads)
        blocks, (first, second) = {}, ("q", "dout") if of_keys else ("k", "v")
        if tiles.tma:
            blocks = {
                f"{first}_desc": Block(first, loaded, self.main),
                f"{second}_desc": Block(second, loaded, self.value),
            }
            blocks |= {f"{first}_tail_desc": Block(first, loaded, self.tail)} if self.tail else {}
        more = (more or {}) | {"heads_per_wave": wave}
        return self.launch(kernel, pairs * self.blocks(length, block), tiles, more, blocks)


class BackwardShapes(DenseShapes):
    """The shapes of a backward call, with methods that make the launches of its kernels."""

    def __init__(self, key: Key, dout: Layout, dlse: Layout | None):
        super().__init__(key)
        # Checked here too, since under a transform the forward does not know that a backward follows.
        widest, is_fp32 = max(self.case.head_dim, self.case.value_dim), self.case.itemsize > 2
        if self.case.arch and is_fp32 and widest > tables.WIDE:
            raise NotImplementedError(f"triton: has a backward in fp32 for heads of up to {tables.WIDE}")
        self.case = self.case._replace(aligned=self.case.aligned and dout.is_in_lines)
        a = key.layouts
        dq, dk, dv = (contiguous(x.shape, x.dtype) for x in (a.q, a.k, a.v))
        self._arguments |= derivatives(a, self.bounds)
        self.learns_slopes, self.rows = a.learns and has_slopes(a), 1 if self.packed else self.batch
        self._arguments |= {
            **strides("bshd", do=dout, dq=dq), **strides("btgd", dk=dk, dv=dv), **strides("bhs", dl=dlse),
        }  # fmt: skip

    def prepare(self) -> Launch:
        """Return the launch that writes lse2 and delta."""
        from ..kernels.backward import prepare

        return self.launch(prepare, self.rows * self.h * -(-self.s // PREPARED.block_m), PREPARED)
