"""What the compile check builds for caches: kernels that read one, that add up and cut its splits, that write
it.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from .builds import FUNCTIONS, OTHERS, Build, pairwise

SELECTED_DECODE = "selected_decode"  # of latents on sm_90, Hopper's own kernel
SELECTED = ("list_blocks", SELECTED_DECODE, "merge_splits")
GROUP = 4  # query heads to a KV head of grouped storage
WITHOUT_FP8 = (80, 86)


class Layer(NamedTuple):
    """Query heads, and the channels of a stored key and its value; ``latent``: of a latent and its rotary
    key.
    """

    heads: int
    key: int
    value: int
    latent: bool = False

    def __str__(self) -> str:
        if self.latent:
            return f"{self.heads} x d{self.key}+{self.value}"
        return f"{self.heads} x d{self.key}" + f"/{self.value}" * (self.key != self.value)


GQA64, GQA128, GQA256 = (Layer(32, d, d) for d in (64, 128, 256))
MLA, WIDE_MLA = (Layer(heads, 512, 64, latent=True) for heads in (16, 128))


class CachedBuild(NamedTuple):
    """A kernel, the chip and the call over a cache that it is built for; ``tokens`` are the new ones of a
    sequence.
    """

    kernel: str  # decode, combine, schedule, write, or one of SELECTED
    arch: int
    layer: Layer = GQA128
    dtype: str = "bf16"  # or fp16, fp32, tf32, or fp8 queries over an fp8 store
    store: str = ""  # or int8, fp8
    page: int = 64  # tokens; 0 where a page holds all of a sequence
    sequences: int = 16
    tokens: int = 1
    packed: bool = False
    mask: str = "causal"  # or full, left, sliding, prefix
    softcap: bool = False
    slopes: bool = False
    sinks: bool = False
    aligned: bool = True  # rows begin at multiples of 16 bytes
    invariant: bool = False  # cut alike whatever the batch is
    rope: str = ""  # or half, interleaved, for what is written
    function: str = ""  # of indices: documents hides tiles, relative changes scores
    block: int = 0  # of keys that lists select, in keys

    def __str__(self) -> str:
        if self.kernel == "schedule":
            return f"schedule of {self.sequences}"
        flags = [name for name in ("softcap", "slopes", "sinks", "invariant") if getattr(self, name)]
        words = [self.kernel, str(self.layer), self.dtype]
        words += [f"in {self.store}"] if self.store else []
        words += [f"{self.rope} rope"] if self.rope else []
        reads = self.kernel in ("decode", *SELECTED[:2])
        words += [self.mask, *([self.function] if self.function else [])] if reads else []
        words += ["packed"] if self.packed else []
        words += [f"{self.tokens} tokens"] if self.tokens > 1 else []
        words += [f"batch of {self.sequences}"] if self.sequences != 16 else []
        words += [f"pages of {self.page}" if self.page else "contiguous"] if self.page != 64 else []
        words += [] if self.aligned else ["unaligned"]
        words += [f"blocks of {self.block}"] if self.block else []
        return f"{' '.join(words)}{', ' if flags else ''}{' '.join(flags)}"


AnyBuild = Build | CachedBuild


def cached_entries() -> Iterator[CachedBuild]:
    """Every entry of the tables of decode kernels on sm_90, and the commonest calls on the other chips."""
    yield from _common(90)
    yield from _selected(90)
    for arch in OTHERS:
        for layer in (GQA128, MLA):
            yield CachedBuild("decode", arch, layer)
        yield CachedBuild("combine", arch)
        yield CachedBuild("write", arch, rope="half")


def cached_calls() -> Iterator[CachedBuild]:
    """Every kind of call on every chip."""
    for arch in (90, *OTHERS):
        yield from _common(arch)
        yield from _rare(arch)
        yield from _selected(arch)


def cached_product() -> Iterator[CachedBuild]:
    """The decode kernels of calls in which any two choices meet."""
    factors = {
        # The last two: one in two blocks, and an odd one with narrower values.
        "layer": (GQA64, GQA128, GQA256, MLA, WIDE_MLA, Layer(32, 192, 128), Layer(32, 59, 29)),
        "arch": (90, *OTHERS),
        "mask": ("causal", "full", "left", "sliding", "prefix"),
        "page": (64, 16, 1, 0),
        "dtype": ("bf16", "fp16", "fp32", "tf32"),
        "store": ("", "int8", "fp8"),
        "tokens": (1, 4, 64),
        "sequences": (16, 1),
        "packed": (False, True),
        "softcap": (False, True),
        "slopes": (False, True),
        "sinks": (False, True),
        "invariant": (False, True),
        "aligned": (True, False),
        "function": ("", *FUNCTIONS),
    }
    never = {frozenset((("arch", arch), ("store", "fp8"))) for arch in WITHOUT_FP8}
    for row in pairwise(factors, never):
        yield CachedBuild("decode", **row)
    for row in pairwise(factors | {"invariant": (False,), "block": (1, 16, 32, 64, 100)}, never):
        yield CachedBuild("selected_decode", **row)


def _common(arch: int) -> Iterator[CachedBuild]:
    """Calls that reach every tile that a chip has, every page size and every store."""
    decode, combine, write = (partial(CachedBuild, kernel, arch) for kernel in ("decode", "combine", "write"))
    stores = ("int8",) if arch in WITHOUT_FP8 else ("int8", "fp8")
    for layer in (GQA64, GQA128, GQA256):
        yield decode(layer)
    for layer in (GQA128, GQA256):
        yield decode(layer, tokens=64)
    for page in (16, 1, 0):
        yield decode(page=page)
    for store in stores:
        yield decode(store=store)
    for layer in (GQA64, GQA256):
        yield decode(layer, store="int8")
    yield decode(tokens=8)
    yield decode(mask="sliding", softcap=True, slopes=True, sinks=True)
    for layer in (GQA128, GQA256, MLA):
        yield decode(layer, dtype="fp32")
    for layer in (MLA, WIDE_MLA):
        yield decode(layer)
        yield decode(layer, store="int8")
    for layer in (GQA128, GQA256, MLA):
        yield decode(layer, invariant=True)
    yield decode(MLA, tokens=2)
    for layer in (MLA, WIDE_MLA):
        yield decode(layer, page=16)
        yield decode(layer, store="int8", page=16)
    yield decode(MLA, tokens=4, page=16)
    yield decode(WIDE_MLA, page=16, function="relative")
    for layer, function, tokens in product((GQA128, MLA), FUNCTIONS, (1, 64)):
        yield decode(layer, function=function, tokens=tokens)
    for function in FUNCTIONS:
        yield decode(WIDE_MLA, function=function)
    yield decode(GQA256, function="relative", tokens=64)
    for layer in (GQA128, MLA):
        for sequences in (16, 1):
            yield combine(layer, sequences=sequences)
    yield CachedBuild("schedule", arch, sequences=64)
    yield write(rope="half")
    yield write(store="int8", rope="half")
    yield write(MLA, rope="interleaved")
    yield write(MLA, store="fp8", rope="interleaved")


def _selected(arch: int) -> Iterator[CachedBuild]:
    """Calls whose lists select tokens of latents for all heads, or blocks for each KV head."""
    listed, decode, merge = (partial(CachedBuild, kernel, arch) for kernel in SELECTED)
    stores = ("", "int8") if arch in WITHOUT_FP8 else ("", "int8", "fp8")
    for layer in (MLA, WIDE_MLA):
        yield listed(layer, block=1)
    for layer, store in product((MLA, WIDE_MLA), stores):
        yield decode(layer, store=store, block=1)
    for store in stores:
        yield decode(store=store, block=64)
    yield decode(WIDE_MLA, block=1, page=16, sequences=1, softcap=True, sinks=True)
    yield decode(WIDE_MLA, block=1, page=0, packed=True, tokens=4)
    yield decode(WIDE_MLA, block=1, slopes=True)
    yield decode(GQA256, block=32)
    yield decode(GQA64, block=128, packed=True, page=16)
    yield decode(block=64, page=0, tokens=4)
    yield decode(block=64, dtype="fp32")
    yield decode(block=64, mask="sliding", softcap=True, slopes=True, sinks=True)
    yield decode(block=64, function="documents")
    yield merge(WIDE_MLA, block=1, sequences=1)
    yield merge(block=64, sequences=1)


def _rare(arch: int) -> Iterator[CachedBuild]:
    """What else a call may be: of several tokens, over latents in fewer bits, of a large batch, of a
    prompt.
    """
    decode, combine, write = (partial(CachedBuild, kernel, arch) for kernel in ("decode", "combine", "write"))
    stores = ("", "int8") if arch in WITHOUT_FP8 else ("", "int8", "fp8")
    yield decode(GQA64, tokens=64)
    yield decode(tokens=4)
    yield decode(tokens=4, mask="sliding", softcap=True, slopes=True, sinks=True)
    yield decode(tokens=64, dtype="fp32")
    for layer, page in product((MLA, WIDE_MLA), (64, 16)):
        yield decode(layer, page=page)
        yield decode(layer, page=page, tokens=4)
    for layer, page, store in product((GQA128, GQA256, MLA, WIDE_MLA), (16, 0), stores):
        yield decode(layer, page=page, store=store, function="documents")
    if arch not in WITHOUT_FP8:
        for layer in (GQA128, MLA):
            yield decode(layer, dtype="fp8", store="fp8")
        yield decode(MLA, store="fp8")
        yield decode(WIDE_MLA, store="fp8")
    for layer in (GQA64, GQA256, WIDE_MLA):
        yield combine(layer)
    yield combine(GQA256, sequences=1)
    yield combine(sequences=1, invariant=True)
    yield combine(sequences=1024)
    for layer in (GQA128, MLA):
        yield combine(layer, tokens=4)
        yield combine(layer, tokens=4, packed=True)
        yield combine(layer, dtype="fp32")
    for sequences in (1, 1024):
        yield CachedBuild("schedule", arch, sequences=sequences)
    for layer in (GQA128, MLA):
        for rope in ("", "half", "interleaved"):
            yield write(layer, rope=rope)
        for store in ("int8", "fp8"):
            yield write(layer, store=store, rope="half")
    yield write(rope="half", dtype="fp32")
    yield write(rope="half", tokens=4096, packed=True)
