"""What the compile check builds: kernels for calls that reach every entry of the launch tables, and flags in
pairs.

Those over caches are in cached_builds.py.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations
from typing import NamedTuple

KERNELS = ("forward", "prepare", "backward_keys", "backward_queries")
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512))  # channels of keys and values
TRAINED = HEADS[:-1]
WIDE = ((512, 512), (576, 512))  # whose dv has a pass of its own on chips with enough shared memory
MIXED = ((64, 32), (32, 16), (16, 64), (96, 96))  # whose tiles would differ in layout, but for launch.widths
MASKS = ("causal", "full", "left", "sliding", "prefix")
ROWS = ("dense", "starts", "ends", "starts and ends", "packed")
STATISTICS = ("maxima", "mass", "row_weights", "mean_weights")
# A kernel, of 64 heads, of 4 apart, and of 64 over the pages of a cache, whose keys are in fp8.
INDEX = ("index_scores", "index_scores_by_head", "index_scores_of_pages")
QUANTIZE = ("quantize_find", "quantize_round")  # the two launches of a kernel, before an e4m3 forward
SELECTED = ("list_blocks", "list_unions", "selected_forward")
LATENTS = "selected_latents"  # Hopper's own kernel behind list_blocks
SELECTED_BACKWARD = ("selected_backward_queries", "selected_backward_keys", "selected_backward_sums")
# Of lists that many heads share.
SELECTED_ENTRIES = ("selected_weights", "selected_queries", "selected_parts", "selected_sums")
FUNCTIONS = ("documents", "relative")
OTHERS = (80, 86, 100, 120)  # chips that few tables are for
SHORT, LONG = 1024, 8192  # tokens


class Build(NamedTuple):
    """A kernel, the chip and the call that it is built for; ``head`` is the channels of a key and of a
    value.
    """

    kernel: str
    arch: int
    head: tuple[int, int]
    dtype: str = "bf16"  # or fp16, fp32, tf32, fp8
    mask: str = "causal"  # or full, left, sliding, prefix
    rows: str = "dense"  # or starts, ends, starts and ends, packed
    tokens: int = LONG
    softcap: bool = False
    slopes: bool = False
    sinks: bool = False
    dropout: float = 0.0
    dlse: bool = False  # a gradient arrives through the LSE
    aligned: bool = True  # rows of q, k and v begin at multiples of 16 bytes
    hopper: bool = False  # by Hopper's own kernels, where there are some for it
    in_order: bool = False  # for deterministic algorithms
    # of indices: documents and trees hide tiles, relative scores are learned but in Hopper's own kernels, and
    # the derivative of capped scores depends on the score
    function: str = ""
    block: int = 0  # of keys that lists select, in keys

    def __str__(self) -> str:
        d, e = self.head
        flags = [name for name in ("softcap", "slopes", "sinks", "dlse") if getattr(self, name)]
        flags += [f"dropout {self.dropout:g}"] if self.dropout else []
        plain = [self.rows] if self.rows != "dense" else []
        plain += [f"{self.tokens} tokens"] if self.tokens != LONG else []
        plain += [] if self.aligned else ["unaligned"]
        plain += ["Hopper"] if self.hopper else []
        plain += ["in order"] if self.in_order else []
        plain += [self.function] if self.function else []
        plain += [f"blocks of {self.block}"] if self.block else []
        words = [self.kernel, f"d{d}" if d == e else f"d{d}/{e}", self.dtype, self.mask]
        return f"{' '.join(words + plain)}{', ' if flags else ''}{' '.join(flags)}"


def entries() -> Iterator[Build]:
    """Every entry of the launch tables on sm_90, and every kernel on the other chips; some come twice."""
    for head in HEADS:
        yield Build("forward", 90, head, mask="full")
        yield Build("forward", 90, head)
        yield Build("forward", 90, head, tokens=SHORT)
        yield Build("forward", 90, head, softcap=True)
        yield Build("forward", 90, head, dtype="fp32")
    for head in TRAINED:
        yield Build("prepare", 90, head)
        for kernel in KERNELS[2:]:
            yield Build(kernel, 90, head)
            yield Build(kernel, 90, head, softcap=True)
            yield Build(kernel, 90, head, dtype="fp32")
    for kernel in KERNELS:
        yield Build(kernel, 90, (128, 128), aligned=False)
    for head in TRAINED:
        yield Build("forward", 90, head, dtype="fp8")
    for head in MIXED:
        yield Build("forward", 90, head, mask="sliding", aligned=False)
        yield Build("backward_queries", 90, head, mask="sliding", aligned=False)
    yield Build("forward", 90, MIXED[0], mask="sliding")  # whose second, careful pass is not pipelined either
    for arch in OTHERS:
        for kernel in KERNELS:
            yield Build(kernel, arch, (128, 128))
    for arch in (100, 120):
        yield Build("forward", arch, (128, 128), dtype="fp8")
    for function in FUNCTIONS:
        for head in TRAINED:
            for kernel in ("forward", *KERNELS[2:]):
                yield Build(kernel, 90, head, function=function)
    yield from quantize_entries()
    yield from statistic_entries()
    yield from index_entries()
    yield from selected_entries()
    yield from tree_entries()
    yield from wide_entries()
    yield from hopper_entries()


def quantize_entries() -> Iterator[Build]:
    """The kernel that rounds q, k and v to e4m3, for GPUs that multiply e4m3."""
    for kernel in QUANTIZE:
        for head in HEADS:
            yield Build(kernel, 90, head)
        for rows in ("starts and ends", "packed"):
            yield Build(kernel, 90, (128, 128), rows=rows)
        for arch in (100, 120):
            yield Build(kernel, arch, (128, 128))


def statistic_entries() -> Iterator[Build]:
    """The tables' entries for largest scores and probabilities, whose calls have no values."""
    for d in (64, 128, 256, 576):
        for kernel in STATISTICS:
            yield Build(kernel, 90, (d, d))
            yield Build(kernel, 90, (d, d), softcap=True, slopes=True)
            yield Build(kernel, 90, (d, d), dtype="fp32")
    for kernel in STATISTICS:
        yield Build(kernel, 90, (128, 128), rows="packed")
        for function in FUNCTIONS:
            yield Build(kernel, 90, (128, 128), function=function)
        for arch in OTHERS:
            yield Build(kernel, arch, (128, 128))
            yield Build(kernel, arch, (576, 576))


def index_entries() -> Iterator[Build]:
    """The entries for scores of index branches, whose tiles depend on the head, the dtype and the chip."""
    for tokens in (1, LONG):
        for arch in (90, 100, 120):
            yield Build(INDEX[2], arch, (128, 128), tokens=tokens)
    for kernel in INDEX[:2]:
        for d in (64, 128, 256):
            yield Build(kernel, 90, (d, d))
        yield Build(kernel, 90, (128, 128), tokens=1)
        yield Build(kernel, 90, (128, 128), dtype="fp32")
        for block in (32, 128):
            yield Build(kernel, 90, (128, 128), block=block)
        yield Build(kernel, 90, (128, 128), dtype="fp32", block=32)
        yield Build(kernel, 86, (128, 128), block=128)
        for arch in OTHERS:
            yield Build(kernel, arch, (128, 128))
            yield Build(kernel, arch, (256, 256))


def selected_entries() -> Iterator[Build]:
    """The tables' entries for keys that lists select, in blocks of a tile, in larger ones and one by one."""
    for head in HEADS:
        yield Build("selected_forward", 90, head, block=64)
        yield Build("selected_forward", 90, head, block=1)
        yield Build("selected_forward", 90, head, dtype="fp32", block=64)
        yield Build("selected_forward", 86, head, block=64)
    for kernel, blocks in zip(SELECTED, ((1, 48), (32, 128), (1, 32, 48, 128)), strict=True):
        for block in blocks:
            yield Build(kernel, 90, (128, 128), block=block)
        block = 16 if kernel == "list_blocks" else 64
        yield Build(kernel, 90, (128, 128), rows="packed", mask="sliding", block=block)
        for arch in OTHERS:
            yield Build(kernel, arch, (128, 128), block=block)
    yield Build("selected_forward", 90, (128, 128), softcap=True, slopes=True, sinks=True, block=64)
    yield Build("selected_forward", 90, (128, 128), function="documents", block=64)
    yield from selected_backward_entries()


def selected_backward_entries() -> Iterator[Build]:
    """The tables' entries for gradients of keys that lists select, and what changes their loops."""
    queries, keys, _ = SELECTED_BACKWARD
    for head in HEADS:
        for kernel in (queries, keys):
            yield Build(kernel, 90, head, block=64)
            yield Build(kernel, 86, head, block=64)
            if head in TRAINED:
                yield Build(kernel, 90, head, dtype="fp32", block=64)
        for kernel in SELECTED_ENTRIES:
            for arch in (86, 90):
                yield Build(kernel, arch, head, block=1)
            if head in TRAINED:
                yield Build(kernel, 90, head, dtype="fp32", block=1)
    for kernel in SELECTED_ENTRIES:
        yield Build(kernel, 90, (128, 128), rows="packed", mask="sliding", block=1)
        for arch in OTHERS:
            yield Build(kernel, arch, (128, 128), block=1)
    for kernel in SELECTED_BACKWARD:
        for block in (16, 128):
            yield Build(kernel, 90, (128, 128), block=block)
        yield Build(kernel, 90, (128, 128), rows="packed", mask="sliding", block=64)
        for arch in OTHERS:
            yield Build(kernel, arch, (128, 128), block=64)
    for kernel, block in ((queries, 64), (keys, 64), (SELECTED_ENTRIES[0], 1)):
        yield Build(kernel, 90, (128, 128), softcap=True, slopes=True, block=block)
        for function in FUNCTIONS:
            yield Build(kernel, 90, (128, 128), function=function, block=block)


def tree_entries() -> Iterator[Build]:
    """The kernels that tell tiles of a tree apart, and those that visit them."""
    for rows in ("dense", "packed"):
        for kernel in ("bound_tiles", "list_tiles", "forward"):
            yield Build(kernel, 90, (128, 128), rows=rows, function="tree", hopper=kernel == "forward")
    for kernel in ("forward", *KERNELS[2:]):
        yield Build(kernel, 90, (128, 128), function="tree")
    yield Build("backward_keys", 90, (128, 128), function="tree", hopper=True)


def wide_entries() -> Iterator[Build]:
    """The tables' entries for heads of more than 256 channels, on chips with much and with little shared
    memory.
    """
    passes = "backward_values", *KERNELS[2:]
    for kernel in ("forward", "prepare", *passes):
        yield Build(kernel, 90, WIDE[0])
    for kernel in passes:
        yield Build(kernel, 90, WIDE[0], softcap=True)
        yield Build(kernel, 90, WIDE[1])
    for kernel in ("forward", *passes):
        yield Build(kernel, 100, WIDE[0])
    for head in WIDE:
        for kernel in ("forward", *KERNELS[2:]):
            yield Build(kernel, 86, head)


def hopper_entries() -> Iterator[Build]:
    """Every entry of the tables of Hopper's own kernels, and all that changes their loops."""
    for head in TRAINED:
        for mask in MASKS:
            yield Build("forward", 90, head, mask=mask, hopper=True)
        for rows in ROWS[1:]:
            yield Build("forward", 90, head, rows=rows, hopper=True)
        for option in ("softcap", "slopes", "sinks"):
            yield Build("forward", 90, head, hopper=True, **{option: True})
        for function in FUNCTIONS:
            yield Build("forward", 90, head, hopper=True, function=function)
            if max(head) <= 128:
                yield Build("backward_keys", 90, head, hopper=True, function=function)
        if max(head) <= 128:
            yield Build("backward_keys", 90, head, hopper=True, function="capped")
            yield Build("backward_keys", 90, head, hopper=True, function="relative", in_order=True)
        for mask in MASKS:
            yield Build("backward_keys", 90, head, mask=mask, hopper=True)
        for rows in ROWS[1:]:
            yield Build("backward_keys", 90, head, rows=rows, hopper=True)
        if head != (192, 128):  # which two passes run
            for mask in ("causal", "full"):
                yield Build("backward_keys", 90, head, mask=mask, hopper=True, in_order=True)
        yield Build("backward_queries", 90, head, hopper=True)
        for mask in MASKS:
            yield Build("forward", 90, head, "fp8", mask=mask, hopper=True)
        for rows in ROWS[1:]:
            yield Build("forward", 90, head, "fp8", rows=rows, hopper=True)
        for option in ("softcap", "slopes", "sinks"):
            yield Build("forward", 90, head, "fp8", hopper=True, **{option: True})
        if head != (192, 128):  # which two passes run
            for option in ("softcap", "slopes"):
                yield Build("backward_keys", 90, head, hopper=True, **{option: True})
    yield from wide_hopper_entries()
    of_latents = Build(LATENTS, 90, HEADS[-1], hopper=True, block=1)
    for changes in ({}, {"dtype": "fp16"}, {"rows": "packed"}, {"softcap": True}, {"sinks": True}):
        yield of_latents._replace(**changes)


def wide_hopper_entries() -> Iterator[Build]:
    """Hopper's own kernels for heads of 257 to 512 channels, and all that changes their loops."""
    for kernel in ("forward", "backward_values", *KERNELS[2:]):
        for mask in MASKS:
            yield Build(kernel, 90, WIDE[0], mask=mask, hopper=True)
        for rows in ROWS[1:]:
            yield Build(kernel, 90, WIDE[0], rows=rows, hopper=True)
        for option in ("softcap", "sinks") if kernel == "forward" else ("softcap",):
            yield Build(kernel, 90, WIDE[0], hopper=True, **{option: True})
    yield Build("forward", 90, WIDE[0], slopes=True, hopper=True)


def product() -> Iterator[Build]:
    """The kernels of forward and of backward calls in which any two choices meet."""
    common = {
        "arch": (90, *OTHERS),
        "mask": MASKS,
        "rows": ROWS,
        "dtype": ("bf16", "fp16", "fp32", "tf32"),
        "dropout": (0.0, 0.1, 0.6),  # from 0.5 on its threshold is an int64
        "tokens": (LONG, SHORT),
        "softcap": (False, True),
        "slopes": (False, True),
        "aligned": (True, False),
    }
    narrow = (
        (16, 16),
        (160, 96),
        (111, 55),
        (59, 29),
    )  # one small, one in two blocks, two odd with narrower values
    for row in pairwise({"head": (*HEADS, *narrow), **common, "sinks": (False, True)}):
        yield Build("forward", **row)
    for row in pairwise({"head": (*TRAINED, *narrow), **common, "dlse": (False, True)}):
        for kernel in KERNELS[1:]:
            yield Build(kernel, **row)


def pairwise(factors: Mapping[str, Sequence], never: Set[frozenset] = frozenset()) -> list[dict]:
    """Rows with a level of each factor, in which any two levels of two factors meet. Greedy, and always the
    same.

    ``never`` are pairs of ``(factor, level)`` that must not meet.

    Raises:
        ValueError: no level of a factor goes with what a row has already.
    """
    pairs = (
        frozenset(((a, x), (b, y)))
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    )
    missing = dict.fromkeys(pair for pair in pairs if pair not in never)
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in factors:
            if name not in row:
                meets = {x: [frozenset(((name, x), pair)) for pair in row.items()] for x in factors[name]}
                met = {
                    x: sum(map(missing.__contains__, new))
                    for x, new in meets.items()
                    if never.isdisjoint(new)
                }
                if not met:
                    raise ValueError(
                        f"{name}: expected a level that may meet {row}, got none; allow one in `never`"
                    )
                row[name] = max(met, key=met.get)
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: row[name] for name in factors})
    return rows
