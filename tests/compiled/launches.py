"""From a build to the launch that its call would make on the chip, and the tensors it takes, which hold
nothing.
"""

from functools import partial
from types import MappingProxyType
from unittest.mock import patch

import torch
from torch import Tensor

from attnlib import mask_mod
from attnlib.backends._triton import backend
from attnlib.backends._triton.decode import operators as cached
from attnlib.backends._triton.decode import shapes as decode_shapes
from attnlib.backends._triton.decode import writes
from attnlib.backends._triton.decode.writes import write_cache
from attnlib.backends._triton.dense import hopper as variants
from attnlib.backends._triton.dense import index_scores, quantize, statistics
from attnlib.backends._triton.dense import shapes as plans
from attnlib.backends._triton.functions.programs import captured
from attnlib.backends._triton.launching import layouts
from attnlib.backends._triton.launching.launch import Launch, plan_cache
from attnlib.backends._triton.launching.layouts import Key, key_of, layout
from attnlib.backends.operators import TENSORS, Arguments, count_learnt
from attnlib.cache.buffer import split_size_of
from attnlib.call.call import Call, Score, checked
from attnlib.fp8 import descales_of
from attnlib.kv import KVLayout, KVView
from attnlib.masks.band import CAUSAL, FULL, Mask, sliding
from attnlib.masks.selection import selected
from attnlib.masks.trees import until
from attnlib.rope.rope import Angles
from attnlib.scores import score_mod

from .builds import (
    INDEX,
    LATENTS,
    LONG,
    QUANTIZE,
    SELECTED,
    SELECTED_BACKWARD,
    SELECTED_ENTRIES,
    STATISTICS,
    Build,
)
from .cached_builds import GROUP, SELECTED_DECODE, AnyBuild, CachedBuild

DTYPES = MappingProxyType(
    {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32,
        "int8": torch.int8, "fp8": torch.float8_e4m3fn, "": None,
    }
)  # fmt: skip
MASKS = MappingProxyType(
    {
        "causal": CAUSAL,
        "full": FULL,
        "left": Mask(1023),
        "sliding": sliding(1024),
        "prefix": Mask(right=0, prefix=100),
    }
)
BATCH, QUERY_HEADS, KV_HEADS = 2, 8, 2  # of every call without a cache
LATENT_HEADS = 128, 1  # query and KV heads where lists select tokens
BLOCK_HEADS = 32, 2  # where they select blocks, whose tiles have 4 queries of 16 heads
TREE = "0 1 None True 1023"  # ends and positions, of a tree with a window
CAPACITY = 8192  # tokens of a sequence in a cache
# Multiprocessors, by which sequences are cut into splits: of an A100, an A40, an H200, a B200 and an RTX
# 5090.
PROCESSORS = MappingProxyType({80: 108, 86: 84, 90: 132, 100: 148, 120: 170})
# Hopper's own kernels over caches, by the name that builds have for them and for the generic kernel.
NAMES = MappingProxyType({"decode_mla": "decode", "decode_gqa": "decode", LATENTS: SELECTED_DECODE})

Prepared = tuple[Launch, dict[str, Tensor | None]]


def prepared(build: AnyBuild) -> Prepared:
    """The Launch of a build, and its tensors by name.

    Raises:
        ValueError: the call of the build does not launch its kernel.
    """
    plan_cache.cache_clear()  # of other chips, which are no part of what decides a plan
    with (
        patch.object(plans, "arch_of", lambda device: build.arch),
        patch.object(index_scores, "arch_of", lambda device: build.arch),
        patch.object(layouts, "processors", lambda device: PROCESSORS[build.arch]),
    ):
        return _over_cache(build) if isinstance(build, CachedBuild) else _dense(build)


def _dense(build: Build) -> Prepared:
    """The launch of a call without a cache, forward or backward."""
    if build.kernel in INDEX:
        return _index_scores(build)
    named = _tensors(build)
    mask = MASKS[build.mask]
    scale, softcap = build.head[0] ** -0.5, 50.0 if build.softcap else None
    read, *programs = _function(build)
    arguments = Arguments(
        *map(named.get, Arguments._fields[:TENSORS]), read,
        mask.left, mask.right, mask.prefix, build.block, scale, softcap, build.dropout, None, None, *programs,
        TREE if build.function == "tree" else None, False, not build.hopper,
    )  # fmt: skip
    named |= captured(arguments, torch.empty(count_learnt(arguments), device="meta"))
    loaded = (named["q"], named["k"], named["v"])
    key = key_of(arguments, *loaded)._replace(
        tf32=build.dtype == "tf32", hopper=build.hopper, in_order=build.in_order,
        same_start=_are_values_keys(build),
    )  # fmt: skip
    if build.kernel in STATISTICS:
        return _statistic(build, key, named)
    if build.kernel == LATENTS:
        return variants.forward(key).launches[-1], named
    if build.kernel in SELECTED:
        return variants.forward(key).launches[build.kernel == SELECTED[-1]], named
    if build.kernel in QUANTIZE:
        return getattr(quantize.plan(key), build.kernel.removeprefix("quantize_")), named | _rounded(named)
    if build.kernel == "bound_tiles":
        return variants.states(key)[0], named
    if build.kernel == "list_tiles":
        return variants.forward(key).launches[0], named
    if build.kernel == "forward":
        plan, dtype = variants.forward(key), named["v"].dtype
        return plan.launches[-1], named | {
            "counter": torch.empty(1, dtype=torch.int32, device="meta") if plan.dynamic else None,
            "transposed": torch.empty(plan.transposed, dtype=dtype, device="meta"),
        }
    plan = variants.backward(key, layout(named["dout"]), layout(named["dlse"]))
    if build.kernel in SELECTED_BACKWARD:
        launches = plan.queries, plan.keys, plan.add
        return launches[SELECTED_BACKWARD.index(build.kernel)], named | _inverted()
    if build.kernel in SELECTED_ENTRIES:
        launches, weights = (*plan.passes[0].products, plan.passes[0].sums), torch.empty_like(named["q"])
        of_pass = {"weights": weights, "parts": torch.empty(4096, dtype=plan.dtype, device="meta")}
        of_pass |= {"at": torch.empty(4096, dtype=torch.int32, device="meta")}
        return launches[SELECTED_ENTRIES.index(build.kernel)], named | _inverted() | of_pass
    return getattr(plan, build.kernel.removeprefix("backward_")), named


def _index_scores(build: Build) -> Prepared:
    """The launch of the scores of an index branch, of as many queries as the build has tokens."""
    by_head, (d, _) = build.kernel == INDEX[1], build.head
    made = partial(torch.empty, device="meta")
    q = made(BATCH, build.tokens, 4 if by_head else 64, d, dtype=DTYPES[build.dtype])
    k, weights = made(BATCH, LONG, d, dtype=q.dtype), None if by_head else made(q.shape[:3])
    ends, table, scale = made(BATCH, build.tokens, dtype=torch.int32), None, None
    if build.kernel == INDEX[2]:
        k, scale = made(256, 64, d, dtype=torch.float8_e4m3fn), made(256, 64)
        table = made(BATCH, LONG // 64, dtype=torch.int32)
    a = index_scores.IndexArguments(
        q, k, weights, ends, None, table, scale, 1.0, not by_head, by_head, build.block or 1, LONG
    )
    return index_scores.plan(key_of(a, q, k)), a._asdict() | {"result": made(1)}


def _inverted() -> dict[str, Tensor | None]:
    """The tensors of a backward that inverts lists."""
    numbers = torch.empty(4096, dtype=torch.int32, device="meta")
    return {"parts": numbers.float(), "edges": numbers, "order": numbers.long(), "choosers": numbers}


def _statistic(build: Build, key: Key, named: dict[str, Tensor | None]) -> Prepared:
    """The launch of a largest score or of probabilities, of 32 rows or 64 keys for each query."""
    of_call = key.arguments._replace(v=layout(named["k"][..., :1]))
    kind, slots = build.kernel.removesuffix("_weights"), 64 if build.kernel == "mean_weights" else 32
    rows = build.kernel == "row_weights"
    kind = {"row": "rows", "mean": "heads"}.get(kind, kind)
    launches, _ = statistics.plan(key._replace(arguments=of_call), kind, rows, slots, False, build.tokens)
    number = torch.empty(1, dtype=torch.int64, device="meta")
    return launches[-1], named | {"result": named["lse"], "rows": number, "at": number}


def _function(build: Build) -> tuple[list[Tensor] | None, str | None, str | None]:
    """The tensors that a function of indices reads, and what it says of a mask or of scores."""
    if build.function == "documents":
        mask = mask_mod(_same_document, torch.empty(BATCH, build.tokens, dtype=torch.int32, device="meta"))
        return list(mask.tensors), mask.program.text, None
    if build.function == "tree":
        shape = (BATCH * build.tokens,) if build.rows == "packed" else (BATCH, build.tokens)
        numbers = torch.empty(shape, dtype=torch.int32, device="meta")
        mask = until(numbers, numbers) & sliding(1024)
        return list(mask.tensors), mask.program.text, None
    if build.function in SCORES:
        score = score_mod(SCORES[build.function], torch.empty(QUERY_HEADS, 257, device="meta"))
        return list(score.tensors), None, score.program.text
    return None, None, None


def _same_document(b, h, i, j, document):
    return document[b, i] == document[b, j]


def _relative(score, b, h, i, j, bias):
    return score + bias[h, (i - j).clamp(-128, 128) + 128]


def _capped(score, b, h, i, j, bias):
    return 30 * torch.tanh(_relative(score, b, h, i, j, bias) / 30)


SCORES = MappingProxyType({"relative": _relative, "capped": _capped})


def _are_values_keys(build: Build) -> bool:
    """Whether lists select latents, whose first channels are the values."""
    return build.block == 1 and build.head == (576, 512)


def _tensors(build: Build) -> dict[str, Tensor | None]:
    """All that kernels of the backend read and write, by name; None for what the call does not have."""
    dtype, packed = DTYPES[build.dtype], build.rows == "packed"
    d, e = build.head
    query_heads, kv_heads = QUERY_HEADS, KV_HEADS
    if build.block:
        query_heads, kv_heads = LATENT_HEADS if build.block == 1 else BLOCK_HEADS

    def dense(heads: int, width: int, apart: int = 0) -> Tensor:
        shape = (BATCH * build.tokens,) if packed else (BATCH, build.tokens)
        return torch.empty((*shape, heads, width + apart), dtype=dtype, device="meta")[..., :width]

    def numbers(*shape: int, dtype: torch.dtype = torch.float32, given: object = True) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device="meta") if given else None

    apart, fp8 = 0 if build.aligned else 1, build.dtype == "fp8"
    has_lists = build.block or build.function in ("documents", "tree")
    rows, lists = dense(1, 1).shape[:-2], 1 if build.block == 1 else kv_heads  # lists of tokens serve all
    k, out = dense(kv_heads, d, apart), dense(query_heads, e)
    v = k[..., :e] if _are_values_keys(build) else dense(kv_heads, e, apart)
    rowwise = (query_heads, BATCH * build.tokens) if packed else (BATCH, query_heads, build.tokens)
    offsets = numbers(BATCH + 1, dtype=torch.int32, given=packed)
    return {
        "q": dense(query_heads, d, apart), "k": k, "v": v,
        "dq": dense(query_heads, d), "dk": dense(kv_heads, d), "dv": dense(kv_heads, e),
        "out": out.bfloat16() if fp8 else out, "dout": dense(query_heads, e),
        "lse": numbers(*rowwise), "lse2": numbers(*rowwise), "delta": numbers(*rowwise),
        "dlse": numbers(*rowwise, given=build.dlse), "dq_sums": numbers(4096),
        "lists": numbers(4096, dtype=torch.int32, given=has_lists), "lengths": None,
        "selected": numbers(*rows, lists, 64 // lists, dtype=torch.int32, given=build.block),
        **dict.fromkeys(("block_ids", "k_rope", "k_scale", "table", "split")),
        "states": numbers(4096, dtype=torch.int32, given=build.function == "tree"),
        "alibi_slopes": numbers(query_heads, given=build.slopes), "dslopes": numbers(1, given=build.slopes),
        "sinks": numbers(query_heads, given=build.sinks),
        "key_starts": numbers(BATCH, dtype=torch.int32, given="starts" in build.rows),
        "key_ends": numbers(BATCH, dtype=torch.int32, given="ends" in build.rows),
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
        "origin": None, "dropout_seed": numbers(1, dtype=torch.int64, given=build.dropout),
        "q_descale": numbers(BATCH, query_heads, given=fp8),
        "k_descale": numbers(BATCH, kv_heads, given=fp8), "v_descale": numbers(BATCH, kv_heads, given=fp8),
    }  # fmt: skip


def _rounded(named: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors that the kernel for rounding to e4m3 writes."""
    numbers = {f"{x}_e4m3": torch.empty_like(named[x], dtype=torch.uint8) for x in "qkv"}
    numbers |= {f"{x}_descale": torch.empty(BATCH, named[x].shape[-2], device="meta") for x in "qkv"}
    return numbers | {"maxima": torch.empty(BATCH * QUERY_HEADS, dtype=torch.int32, device="meta")}


def _over_cache(build: CachedBuild) -> Prepared:
    """What the backend launches when it is called, with all that asks a device answered for the chip."""
    made = {}

    def remember(launch: Launch, tensors: dict[str, Tensor | None]):
        names = {*launch.tensors, *(block.tensor for block in launch.blocks.values()), *launch.captured}
        kernel = launch.kernel.__name__
        made[NAMES.get(kernel, kernel)] = (
            launch,
            {name: tensors.get(name) for name in names},
        )

    decode_plan = cached.decode_plan

    def plan(key: Key):
        return decode_plan(key._replace(tf32=build.dtype == "tf32"))

    with (
        patch.object(
            torch.ops.attnlib, "triton_cached", backend.cached.run
        ),  # else torch would ask for shapes alone
        patch.object(torch.ops.attnlib, "triton_write", writes._write),
        patch.object(decode_shapes, "arch_of", lambda device: build.arch),
        patch.object(Launch, "on", remember),
        patch.object(cached, "decode_plan", plan),
        patch.object(layouts, "processors", lambda device: PROCESSORS[build.arch]),
    ):
        (_write if build.kernel == "write" else _read)(build)
    if build.kernel not in made:
        raise ValueError(
            f"kernel: expected one that this call launches, {', '.join(made)}, got {build.kernel}"
        )
    return made[build.kernel]


def _read(build: CachedBuild):
    view, mask, layer, function = _view(build), MASKS[build.mask], build.layer, None
    if build.function == "documents":
        mask &= mask_mod(
            _same_document, torch.empty(build.sequences, CAPACITY, dtype=torch.int32, device="meta")
        )
    elif build.function == "relative":
        function = score_mod(_relative, torch.empty(layer.heads, 257, device="meta"))
    if build.block:
        lists, entries = (1, 2048) if build.block == 1 else (view.layout.heads, 16)
        lead = _tokens(build, 1, 1).shape[:-2]
        mask &= selected(torch.empty(*lead, lists, entries, dtype=torch.int32, device="meta"), build.block)
    width = layer.key + layer.value if layer.latent else layer.key
    q = _tokens(build, layer.heads, width)
    slopes = torch.empty(layer.heads, device="meta") if build.slopes else None
    sinks = torch.empty(layer.heads, device="meta") if build.sinks else None
    score = Score(width**-0.5, 50.0 if build.softcap else None, slopes, sinks, function)
    descale = torch.empty(build.sequences, layer.heads, device="meta") if build.dtype == "fp8" else None
    backend.cached.attention(checked(Call(q, mask, score, kv=view, descales=descales_of(descale))))


def _write(build: CachedBuild):
    view, layer = _view(build), build.layer
    heads = () if layer.latent else (view.layout.heads,)
    k, v = (_tokens(build, *heads, width) for width in (layer.key, layer.value))
    lead = k.shape[: k.dim() - 1 - len(heads)]
    angles = None
    if build.rope:
        turned = torch.empty(*lead, (layer.value if layer.latent else layer.key) // 2, device="meta")
        angles = Angles(turned, turned, build.rope == "interleaved")
    write_cache(view, k, v, torch.empty(lead, dtype=torch.int64, device="meta"), angles)


def _tokens(build: CachedBuild, *sizes: int) -> Tensor:
    """The new tokens of all sequences."""
    lead = (build.sequences * build.tokens,) if build.packed else (build.sequences, build.tokens)
    return _rows(*lead, *sizes, dtype=DTYPES[build.dtype], aligned=build.aligned)


def _view(build: CachedBuild) -> KVView:
    layer, computed = build.layer, "bf16" if build.dtype == "fp8" else build.dtype
    dtypes = {"dtype": DTYPES[computed], "storage_dtype": DTYPES[build.store]}
    if layer.latent:
        kept = KVLayout.latent(layer.key, layer.value, **dtypes)
    else:
        kept = KVLayout.grouped(layer.heads // GROUP, layer.key, layer.value, **dtypes)
    size = build.page or CAPACITY
    columns = CAPACITY // size
    given = {}
    for name, (heads, width, dtype) in kept.planes.items():
        lead = (build.sequences * columns, size, heads)
        if width:
            given[name] = _rows(*lead, width, dtype=dtype, aligned=build.aligned)
        else:
            given[name] = torch.empty(lead, dtype=dtype, device="meta")
    if layer.latent:
        given |= {"v": given["k"], "v_scale": given.get("k_scale")}
    table, each, offsets = (
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in ((build.sequences, columns), build.sequences, build.sequences + 1)
    )
    given["cu_seqlens_q"] = offsets if build.packed else None
    split_size = split_size_of(CAPACITY) if build.invariant else 0
    return KVView(kept, size, table=table, starts=each, lengths=each, split_size=split_size, **given)


def _rows(*shape: int, dtype: torch.dtype, aligned: bool) -> Tensor:
    """Rows that lie one after another, or one element apart."""
    *lead, width = shape
    return torch.empty(*lead, width + (not aligned), dtype=dtype, device="meta")[..., :width]
