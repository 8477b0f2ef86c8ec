"""Write the table of features in docs/features.md: ``python docs/features.py``.

Each row describes a call on meta tensors, and its cells are the backends' own answers: ``unsupported`` tells
whether a backend runs the call, and ``variant`` which kernels run it. No GPU is needed, but Triton is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest.mock import patch

import torch

from attnlib import CAUSAL, FULL, KVLayout, KVView, Mask, mask_mod, masks, score_mod, scores, sliding
from attnlib.backends._triton.decode import shapes as decode_shapes
from attnlib.backends._triton.decode.schedule import new_schedule
from attnlib.backends._triton.dense import shapes as dense_shapes
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.cache.buffer import split_size_of
from attnlib.call.call import Call, Dropout, Packing, checked
from attnlib.dispatch.select import backend_of
from attnlib.fp8 import E4M3, descales_of
from attnlib.masks.band import AnyMask
from attnlib.scores import Score

PAGE = Path(__file__).resolve().parent / "features.md"
BEGIN, END = "<!-- written by docs/features.py -->\n", "<!-- end of what docs/features.py writes -->\n"
ARCHES, HOPPER = (80, 86, 89, 90, 100, 120), 90  # compute capabilities
COLUMNS = MappingProxyType(  # the names of backends, and what a column is called
    {"torch": "torch", "triton:generic": "Triton", "triton": "Hopper kernels", "reference": "reference"}
)
TOKENS, SEQUENCES, HEADS, KV_HEADS = 1024, 2, 32, 8  # of a call without a cache
CAPACITY, CACHED_SEQUENCES = 8192, 16  # tokens of a sequence in a cache, and sequences
FORWARD, BACKWARD = False, True  # whether a gradient is needed
BANDS = (FULL, CAUSAL, sliding(256), Mask(256, 256), Mask(right=0, prefix=100))
NO_OPTIONS = Score()
meta = partial(torch.empty, device="meta")
numbers = partial(meta, dtype=torch.int32)


class Feature(NamedTuple):
    """A row of the table: each of ``calls`` makes a call, which needs a gradient or not.

    ``passes`` lists the passes to ask about. All calls of a row have the same answers.
    """

    name: str
    calls: tuple[Callable[[bool], Call], ...]
    passes: tuple[bool, ...] = (FORWARD, BACKWARD)
    deterministic: bool = False


def dense(
    name: str,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    widths: tuple[tuple[int, int], ...] = ((128, 128),),
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    tokens: int = TOKENS,
    packed: bool = False,
    bounds: bool = False,
    given: tuple[AnyMask, ...] = (CAUSAL,),
    score: Score = NO_OPTIONS,
    learns: bool = False,
    dropout: float = 0.0,
    lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Feature:
    """Return a feature of calls without a cache; with ``learns``, the score's tensors get gradients too."""

    def make(dtype: torch.dtype, width: tuple[int, int], mask: AnyMask, grad: bool) -> Call:
        (h, g), (d, e), lead = heads, width, (SEQUENCES * tokens,) if packed else (SEQUENCES, tokens)
        q, k, v = (meta(*lead, n, size, dtype=dtype) for n, size in ((h, d), (g, d), (g, e)))
        offsets, bound = numbers(SEQUENCES + 1), numbers(SEQUENCES) if bounds else None
        return Call(
            q.requires_grad_(grad), mask, learning(score) if learns and grad else score, k, v,
            key_starts=bound, key_ends=bound, lse=lse, dropout=Dropout(dropout),
            compute_dtype=compute_dtype,
            packing=Packing(offsets, offsets) if packed else None,
            descales=descales_of(*(meta(SEQUENCES, n) for n in (h, g, g))) if dtype == E4M3 else None,
        )  # fmt: skip

    calls = tuple(partial(make, *each) for each in product(dtypes, widths, given))
    return Feature(name, calls, deterministic=deterministic)


def learning(score: Score) -> Score:
    """Return the same options with tensors that need gradients."""
    function = score.function
    if function is not None:
        function = function.reading([x.clone().requires_grad_() for x in function.tensors])
    named = {name: x.clone().requires_grad_() for name, x in score.tensors.items()}
    return score._replace(function=function, **named)


def cached(
    name: str,
    *layouts: KVLayout,
    heads: int = HEADS,
    dtype: torch.dtype | None = None,
    tokens: int = 1,
    capacity: int = CAPACITY,
    page_sizes: tuple[int, ...] = (64,),
    packed: bool = False,
    batch_invariant: bool = False,
    mask: AnyMask = CAUSAL,
    score: Score = NO_OPTIONS,
    passes: tuple[bool, ...] = (FORWARD,),
) -> Feature:
    """Return a feature of calls over caches of ``layouts``; ``dtype`` is that of the queries."""

    def make(layout: KVLayout, page_size: int, grad: bool) -> Call:
        b, columns = CACHED_SEQUENCES, capacity // page_size
        split_size = split_size_of(capacity) if batch_invariant else 0
        planes = {
            plane: meta(b * columns, page_size, n, *([width] if width else []), dtype=stored)
            for plane, (n, width, stored) in layout.planes.items()
        }
        planes |= {"v": planes["k"], "v_scale": planes.get("k_scale")} if layout.is_latent else {}
        device = planes["k"].device
        view = KVView(
            layout, page_size, table=numbers(b, columns), starts=numbers(b), lengths=numbers(b),
            cu_seqlens_q=numbers(b + 1) if packed else None, split_size=split_size, **planes,
            schedule=new_schedule(layout.heads, b, device, limit=capacity, split_size=split_size),
        )  # fmt: skip
        lead = (b * tokens,) if packed else (b, tokens)
        q = meta(*lead, heads, layout.dim + layout.rope_dim, dtype=dtype or layout.dtype)
        descales = descales_of(meta(b, heads)) if dtype == E4M3 else None
        return Call(q.requires_grad_(grad), mask, score, kv=view, descales=descales)

    return Feature(name, tuple(partial(make, *each) for each in product(layouts, page_sizes)), passes)


DOCUMENTS = CAUSAL & masks.documents(numbers(SEQUENCES, TOKENS))
ENDS = numbers(SEQUENCES, TOKENS)
TREE = masks.until(ENDS, ENDS) & sliding(256)
LISTS = numbers(SEQUENCES, TOKENS, KV_HEADS, 4)
SELECTED = (CAUSAL & masks.selected(LISTS, 64), CAUSAL & masks.selected(LISTS[:, :, :1]))
EVERY_SECOND = CAUSAL & mask_mod(lambda b, h, i, j: (i - j) % 2 == 0)
READS_TENSOR = Score(function=scores.distance_bias(meta(HEADS, 256)))
SUMS = Score(function=score_mod(lambda score, b, h, i, j: score - 0.1 * (i - j)))
TANH = Score(function=score_mod(lambda score, b, h, i, j: 9 * (score / 8).tanh()))
EXPANDED, ABSORBED = (192, 128), (576, 512)  # channels of keys and values in DeepSeek's MLA
ON_TENSORS = (
    dense("bf16, fp16", dtypes=(torch.bfloat16, torch.float16)),
    dense("fp32", dtypes=(torch.float32,)),
    dense("fp64", dtypes=(torch.float64,)),
    dense("fp8, from `quantize_fp8`", dtypes=(E4M3,)),
    dense(
        "a forward in e4m3, by `compute_dtype`", dtypes=(torch.bfloat16, torch.float16), compute_dtype=E4M3
    ),
    dense("up to 512 keys", tokens=512),
    dense("heads of up to 32 channels", widths=((16, 16), (32, 32))),
    dense("heads of 64, 96, 128 or 256 channels", widths=tuple((n, n) for n in (64, 96, 128, 256))),
    dense("heads of 192 channels", widths=((192, 192),)),
    dense("heads of 192 channels, values of 128 (expanded MLA)", widths=(EXPANDED,)),
    dense("heads of 512 channels", widths=((512, 512),)),
    dense("heads of 576 channels, values of 512 (absorbed MLA)", widths=(ABSORBED,)),
    dense("heads of 1,024 channels", widths=((1024, 1024),)),
    dense("heads of an odd width, such as 59", widths=((59, 59), (127, 127))),
    dense("MHA: as many KV heads as query heads", heads=(HEADS, HEADS)),
    dense("GQA: fewer KV heads"),
    dense("MQA: one KV head", heads=(HEADS, 1)),
    dense("`FULL`, `CAUSAL`, `sliding(n)`, any `Mask(...)`", given=BANDS),
    dense("mask functions", given=(DOCUMENTS, EVERY_SECOND)),
    dense(
        "trees of sequences, with a window and ALiBi", given=(TREE,), score=Score(alibi_slopes=meta(HEADS))
    ),
    dense("keys or blocks that lists select, by `masks.selected`", given=SELECTED),
    dense("mask functions, more than 128 channels", given=(DOCUMENTS,), widths=(EXPANDED, (256, 256))),
    dense("mask functions, fp8", given=(DOCUMENTS,), dtypes=(E4M3,)),
    dense("score functions of sums and products, more than 64 channels", score=SUMS),
    dense("the same, up to 64 channels", score=SUMS, widths=((64, 64),)),
    dense("score functions with exponentials", score=TANH),
    dense("score functions that read a tensor", score=READS_TENSOR),
    dense("the same, and gradients of the tensor", score=READS_TENSOR, learns=True),
    dense("softcap", score=Score(softcap=50.0), widths=((64, 64), (128, 128), (256, 256))),
    dense("softcap, 192 channels and values of 128", score=Score(softcap=50.0), widths=(EXPANDED,)),
    dense("ALiBi", score=Score(alibi_slopes=meta(HEADS))),
    dense("the same, and gradients of the slopes", score=Score(alibi_slopes=meta(HEADS)), learns=True),
    dense("sinks", score=Score(sinks=meta(HEADS))),
    dense("the same, and gradients of the sinks", score=Score(sinks=meta(HEADS)), learns=True),
    dense("dropout", dropout=0.1),
    dense("packed sequences, by `varlen_attention`", packed=True),
    dense("key bounds, by `key_starts` and `key_ends`", bounds=True),
    dense("the LSE and its gradient, by `attention_with_lse`", lse=True),
    dense("deterministic algorithms", deterministic=True),
    dense("the same, expanded MLA", deterministic=True, widths=(EXPANDED,)),
)
of_128 = partial(KVLayout.grouped, KV_HEADS, 128)
latent = partial(KVLayout.latent, 512, 64, dtype=torch.bfloat16)
PAGES = of_128(dtype=torch.bfloat16)
INT8_PAGES, FP8_PAGES = (replace(PAGES, storage_dtype=x) for x in (torch.int8, E4M3))
OVER_CACHES = (
    cached("bf16, fp16", PAGES, of_128(dtype=torch.float16)),
    cached("fp32", of_128(dtype=torch.float32)),
    cached("fp64", of_128(dtype=torch.float64)),
    cached("int8", INT8_PAGES),
    cached("fp8", FP8_PAGES),
    cached("fp8, and fp8 queries", FP8_PAGES, dtype=E4M3),
    cached("int8, more than 16 query rows per KV head", INT8_PAGES, tokens=1 + 16 * KV_HEADS // HEADS),
    cached("int8, KV heads not a multiple of 8", replace(INT8_PAGES, heads=4)),
    cached("contiguous, or pages of 16 tokens or more", PAGES, page_sizes=(16, 32, 128, CAPACITY)),
    cached("pages of 8 tokens", PAGES, page_sizes=(8,)),
    cached("less than 131,072 tokens x KV heads", PAGES, capacity=512),
    cached("heads of other widths", *(KVLayout.grouped(KV_HEADS, n, dtype=PAGES.dtype) for n in (64, 256))),
    cached("latents of 512 + 64 channels (absorbed MLA)", latent(), heads=128),
    cached("the same, int8", latent(storage_dtype=torch.int8), heads=128),
    cached("the same, fp8", latent(storage_dtype=E4M3), heads=128),
    cached("latents in pages of less than 64 tokens", latent(), heads=128, page_sizes=(16, 32)),
    cached("latents of other widths", KVLayout.latent(256, 32, dtype=torch.bfloat16), heads=128),
    cached("packed steps of a few tokens per sequence", PAGES, packed=True),
    cached("up to 32 query rows per KV head", PAGES, tokens=32 * KV_HEADS // HEADS),
    cached("more query rows per KV head", PAGES, tokens=1 + 32 * KV_HEADS // HEADS),
    cached("windows, softcap", PAGES, mask=sliding(256), score=Score(softcap=50.0)),
    cached("ALiBi, sinks", PAGES, score=Score(alibi_slopes=meta(HEADS), sinks=meta(HEADS))),
    cached("mask functions", PAGES, mask=EVERY_SECOND),
    cached("score functions", PAGES, score=READS_TENSOR),
    cached("mask and score functions over latents", latent(), heads=128, mask=EVERY_SECOND),
    cached(
        "keys or blocks that lists select",
        PAGES,
        mask=CAUSAL & masks.selected(numbers(CACHED_SEQUENCES, 1, KV_HEADS, 16), 64),
    ),
    cached("`batch_invariant=True`", PAGES, batch_invariant=True),
    cached("gradients", PAGES, passes=(BACKWARD,)),
)


@contextmanager
def on_hopper(*, deterministic: bool) -> Iterator[None]:
    """Plan launches as on a Hopper GPU; restore everything at the end."""
    arch, before = lambda device: HOPPER, torch.are_deterministic_algorithms_enabled()
    plan_cache.cache_clear()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with patch.object(dense_shapes, "arch_of", arch), patch.object(decode_shapes, "arch_of", arch):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        plan_cache.cache_clear()


def cell(name: str, feature: Feature) -> tuple[str, list[str]]:
    """Return a cell of the column of backend ``name``, and the reasons against what is not possible.

    Raises:
        ValueError: the calls of the feature have different answers.
    """
    answers = [_answer(name, feature, make) for make in feature.calls]
    if len({text for text, _ in answers}) > 1:
        raise ValueError(f"{feature.name}: expected one answer of {name}, got {answers}; make it two rows")
    return answers[0]


def _answer(name: str, feature: Feature, make: Callable[[bool], Call]) -> tuple[str, list[str]]:
    arches = (HOPPER,) if name == "triton" else ARCHES
    able, first, reasons = [], 0, []
    for grad in feature.passes:
        spec = checked(make(grad)).spec
        specs = {arch: spec._replace(device="cuda", arch=arch) for arch in arches}
        against = {arch: backend_of(name).unsupported(each) for arch, each in specs.items()}
        reasons += next((why for why in against.values() if why), [])
        runs = [arch for arch, why in against.items() if not why]
        if not runs:
            break  # without a forward there is no backward
        able, first = [*able, grad], max(first, runs[0])
    if not able:
        return "no", reasons
    text = "yes" if (*able,) == feature.passes else "forward"
    if name == "triton":
        with on_hopper(deterministic=feature.deterministic):
            return _of_variant(backend_of(name).variant(checked(make(able[-1]))), text), reasons
    return text if first == arches[0] else f"{text}, from sm_{first}", reasons


def _of_variant(variant: str, text: str) -> str:
    """Return a cell of the Hopper column; ``text`` is the cell if the Hopper kernels run all passes."""
    forward, backward = (*["Hopper" in part for part in variant.split(", ")] * 2,)[:2]
    if forward and backward:
        return text
    return "forward" if forward else "backward" if backward else "generic"


def table(features: Sequence[Feature], heading: str, reasons: list[str]) -> Iterator[str]:
    """Yield the lines of a table; append new reasons to ``reasons``, whose numbers stand in the cells."""
    yield f"| {heading} | {' | '.join(COLUMNS.values())} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for feature in features:
        cells = []
        for name in COLUMNS:
            text, found = cell(name, feature)
            reasons += [reason for reason in dict.fromkeys(found) if reason not in reasons]
            marks = ", ".join(str(reasons.index(reason) + 1) for reason in dict.fromkeys(found))
            cells.append(f"{text} ({marks})" if marks else text)
        yield f"| {feature.name} | {' | '.join(cells)} |"


def written(page: str) -> str:
    """Return the page with the current tables and reasons between its two markers."""
    reasons: list[str] = []
    lines = [*table(ON_TENSORS, "calls on tensors", reasons), ""]
    lines += [*table(OVER_CACHES, "calls over a cache", reasons), ""]
    lines += ["The backends' own messages, by the numbers in brackets:", ""]
    lines += [f"{n}. {reason}" for n, reason in enumerate(reasons, 1)]
    before, _, rest = page.partition(BEGIN)
    text = "\n".join(lines)
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
