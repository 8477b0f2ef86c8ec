"""The shapes of a call over a cache, and the launch arguments derived from them."""

from ....call.spec import arch_of
from ....internal.checks import INT32
from ....tracing.program import Program
from ...operators import result_dtype
from ..functions.programs import bounds, functions
from ..launching import layouts
from ..launching.config import LaunchConfig
from ..launching.launch import has_gluon
from ..launching.layouts import Key, contiguous, has_slopes, scoring, strides
from . import tables as decode_tables


class DecodeShapes:
    """The shapes of a decode call, and the launch arguments of its two kernels (decode and combine)."""

    def __init__(self, key: Key):
        self.a = a = key.layouts
        (_, page_size, self.g, d), tail, e = (
            a.k.shape,
            a.k_rope.shape[-1] if a.k_rope else 0,
            (a.v or a.k).shape[-1],
        )
        (self.b, columns), (self.s, self.h) = a.table.shape, a.q.shape[-3:-1]
        self.packed, self.group = a.cu_seqlens_q is not None, self.h // self.g
        self.max_tokens, planes = columns * page_size, [x for x in (a.k, a.k_rope, a.v) if x]
        rows = decode_tables.rows(self.s, self.b, self.group) if self.packed else self.s * self.group
        one = not self.packed and self.s == 1
        if a.selected is not None:  # the query heads of one query that share a list and a KV head
            rows, one = self.h // max(a.selected.shape[-2], self.g), True
        self.case = decode_tables.DecodeCase(
            rows, d, tail, e, 4 if a.q.dtype.itemsize > 2 else a.k.dtype.itemsize, latent=a.v is None,
            one=one, page_size=0 if columns == 1 else page_size,
            arch=arch_of(key.device), changed=a.score_program is not None,
            aligned=key.aligned and all(x.is_in_lines for x in planes)
            and all(x == contiguous(x.shape, x.dtype) for x in (*planes, a.k_scale, a.v_scale) if x),
        )  # fmt: skip
        self.hopper = self._dedicated(key)
        self.heads = decode_tables.together(self.g, self.hopper)
        self.tiles = self.hopper or (decode_tables.fixed if a.split_size else decode_tables.decode)(self.case)
        if a.selected is not None and self.hopper is None:
            self.tiles = decode_tables.selected(self.case, block_size=a.block_size)
        self.pairs = not a.split_size and decode_tables.pairs(self.case, self.tiles)
        self.tf32 = key.tf32 and decode_tables.may_use_tf32(self.case)
        self.mean = mean = -(-self.s // max(1, self.b)) if self.packed else self.s  # queries per sequence
        self.blocks = 1 if self.packed and not a.split_size else -(-mean * self.group // self.tiles.block_m)
        self.processors = processors = layouts.processors(key.device)
        programs = self.g // self.heads * self.blocks  # programs per split
        self.sparse = a.mask_program is not None and not a.split_size
        self.halvings = (
            0 if a.split_size else decode_tables.halvings(self.tiles, programs, self.g, whole=self.sparse)
        )
        self.capacity = max(1, decode_tables.capacity(processors, self.g) >> self.halvings)
        self.slots = decode_tables.slots(self.b, self.capacity)
        self.scheduled = mean <= decode_tables.LONG or self.b < self.capacity
        if a.split_size:
            self.slots = self.b * -(-self.max_tokens // a.split_size)
            self.scheduled = self.b * self.g * self.blocks < processors * self.tiles.resident

        if self.packed and not self.scheduled:
            self.blocks = 1  # the blocks of all sequences are numbered consecutively
        self._count(processors)

    def _dedicated(self, key: Key) -> LaunchConfig | None:
        """Return the tiles of the dedicated Hopper kernel that takes the call, or None."""
        a = self.a
        if a.selected is not None:
            takes = key.hopper and has_gluon() and self._selects_latents()
            return decode_tables.selected_latents(self.case) if takes else None
        takes = key.hopper
        takes = takes and (a.mask_program is a.score_program is None or a.v is None)
        takes = takes and not a.split_size and a.origin is None and a.q.dtype.itemsize > 1 and has_gluon()
        # A TMA descriptor must load at least 16 bytes of scales at once: 4 tokens of a latent. For keys and
        # values, it loads the scales of 8 KV heads, because a program decodes up to 8 of them together.
        takes = takes and (a.k_scale is None or (a.k.shape[1] % 4 if a.v is None else self.g % 8) == 0)
        found = decode_tables.hopper(self.case, self.b * self.max_tokens * self.g) if takes else None
        if found is not None and a.mask_program is not None:
            # All rows of a block must have the same rows of states of the mask function's tiles.
            fits = 0 in (found.block_m % self.group, self.group % found.block_m)
            return found if fits and "h" not in Program(a.mask_program).read else None
        return found

    def _selects_latents(self) -> bool:
        """True if one list of tokens serves all heads, and no option needs the generic kernel."""
        a = self.a
        near = a.q.strides[-2] < decode_tables.FARTHEST and a.q.dtype == (a.k_rope or a.k).dtype
        plain = a.mask_program is a.score_program is a.origin is None and not has_slopes(a)
        return near and plain and a.selected.shape[-2] == a.block_size == 1

    def _count(self, processors: int) -> None:
        """Count the programs of the grid, and the rows of the buffer for partial results."""
        # The grid has one slot for each split in the schedule. Packed queries need one more, for query rows
        # that follow the last sequence. Last come the slots for blocks of long sequences.
        self.planned, self.long_slots, self.long_splits = (
            (self.slots + self.packed) * self.scheduled,
            self.b,
            1,
        )
        # Every packed sequence may end with a partial block. With a schedule, only long sequences (those with
        # more query rows than fit in one slot) need extra slots. Without a schedule, every sequence does.
        if self.packed:
            rows, fit = self.s * self.group, self.blocks * self.tiles.block_m
            blocks, partial = (
                rows // self.tiles.block_m,
                min(rows // fit, self.b + 1) if self.scheduled else self.b + 1,
            )
            self.long_slots = -(-(blocks + partial) // self.blocks)
            if self.scheduled and not self.a.split_size and (self.s - self.b + 1) * self.group > fit:
                self.long_splits = decode_tables.long_splits(self.tiles, blocks * self.g, processors)
        elif self.scheduled:
            self.long_slots = 0
        of_lines = self.planned + (self.long_slots * self.long_splits if self.long_splits > 1 else 0)
        self.programs = (
            (self.planned + self.long_slots * self.long_splits) * (self.g // self.heads) * self.blocks
        )
        self.lines = of_lines * self.g * self.blocks * self.tiles.block_m

    def arguments(self) -> dict:
        """Return the launch arguments of both kernels, by name."""
        a, case = self.a, self.case
        main, tail, value = decode_tables.widths_of(case.head_dim, case.tail, case.value_dim)
        full = self.tiles.tma or self.pairs or not (case.one or a.split_size)
        full = (full and a.mask_program is None) or self.sparse
        out = contiguous((*a.q.shape[:-1], case.value_dim), result_dtype(a.q.dtype))
        return {
            **strides("bshd", q=a.q, o=out),
            **strides("ptgd", k=a.k, v=a.v or a.k, t=a.k_rope or a.k),
            **strides("ptg", ks=a.k_scale, vs=a.v_scale or a.k_scale),
            "stride_lb": 0 if self.packed else self.h * self.s, "stride_lh": self.s,
            "stride_table": a.table.strides[0], **scoring(a, self.h, self.max_tokens + self.s),
            "pages": a.k.shape[0], "batch": self.b, "group": self.group, "s": self.s, "slots": self.slots,
            "long": self.long_slots, "long_splits": self.long_splits, "lines": self.lines,
            "schedule_offset": a.schedule.shape[2] * decode_tables.ENTRY * self.halvings if a.schedule else 0,
            "BLOCKS": self.blocks, "limit": min(INT32, self.max_tokens), "D": case.head_dim + case.tail,
            "D_MAIN": main, "D_TAIL": tail, "TAIL": 0 if case.tail else main, "E": case.value_dim,
            "E_MAIN": value, "LATENT": case.latent, "ONE": case.one, "SCHEDULED": self.scheduled,
            "SPLIT_SIZE": a.split_size, "NATIVE": case.arch > 0, "FULL": full, "PAGE": case.page_size,
            **functions(a, bounds(a, self.b, self.h, self.max_tokens + self.s)), "KV_HEADS": self.g,
            "EDGE": decode_tables.EDGE if self.tiles.tma else self.tiles.block_n, "TF32": self.tf32,
            "PAIRS": self.pairs, "HEADS": self.heads, "EARLY": self.case.arch == 90,
            **dict.fromkeys(("planes", "columns", "room", "GRAIN_M", "GRAIN")),  # set only for mask functions
        }  # fmt: skip
