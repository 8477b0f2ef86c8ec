"""What the compile check builds for caches: which calls these are, and that each is the launch of its
call.
"""

import pytest
import torch
from compiled import check
from compiled.cached_builds import (
    GQA64,
    GQA128,
    MLA,
    SELECTED,
    WIDE_MLA,
    CachedBuild,
    Layer,
    cached_calls,
    cached_entries,
    cached_product,
)
from compiled.chipless import binary, distinct
from compiled.launches import DTYPES, prepared

from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching import layouts
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import Launch, plan_cache

pytest.importorskip("triton")

KERNELS = {"decode", "combine", "schedule", "write", *SELECTED}
DECODE, COMBINE, WRITE = (CachedBuild(kernel, 90) for kernel in ("decode", "combine", "write"))
LISTED = CachedBuild("selected_decode", 90, block=64)


def test_every_entry_of_the_decode_tables_is_built(monkeypatch):
    """Each entry gets a number, as its stages; all must turn up in the launches."""
    numbered = {}

    def number(config, name):
        numbered[1000 + 10 * len(numbered)] = name
        return config._replace(stages=max(numbered))

    for name, value in list(vars(decode_tables).items()):
        if isinstance(value, LaunchConfig):
            monkeypatch.setattr(decode_tables, name, number(value, name))
        elif isinstance(value, tuple) and {type(x[-1]) for x in value if isinstance(x, tuple)} == {
            LaunchConfig
        }:
            anew = tuple((limit, number(config, f"{name}, up to {limit}")) for limit, config in value)
            monkeypatch.setattr(decode_tables, name, anew)
    assert len(numbered) > 5
    plan_cache.cache_clear()
    try:
        for build in cached_entries():
            numbered.pop(prepared(build)[0].options["num_stages"], None)
    finally:
        plan_cache.cache_clear()
    assert not numbered


def test_every_kernel_is_built_for_every_chip():
    built = {(build.kernel, build.arch) for build in cached_calls()}
    assert built == {(kernel, arch) for kernel in KERNELS for arch in (80, 86, 90, 100, 120)}


def test_tokens_of_latents_are_for_hoppers_own_kernel():
    """Of lists for all heads; few queries divide a list into pairs of tiles of 64 tokens."""
    latents = CachedBuild("selected_decode", 90, WIDE_MLA, block=1, sequences=64)
    for changes, splits in (({}, 1), ({"sequences": 1}, 16), ({"sequences": 8, "packed": True}, 8)):
        for page, store in ((64, ""), (16, "int8"), (0, "fp8")):
            call = latents._replace(page=page, store=store, softcap=True, sinks=True, **changes)
            launch, named = prepared(call)
            assert launch.kernel.__name__ == "selected_latents"
            assert (launch.arguments["splits"], launch.arguments["SPLIT"]) == (splits, splits > 1)
            listing, _ = prepared(call._replace(kernel="list_blocks"))
            assert (listing.arguments["PAGE"], listing.arguments["EARLY"]) == (page, True)
            assert listing.arguments["page_rows"] == (page or 8192)
            assert listing.options["launch_pdl"]
            assert launch.options["launch_pdl"]
            assert named["k"].shape[-1] + named["k_rope"].shape[-1] == 576
    generic = (
        {"layer": MLA}, {"layer": WIDE_MLA._replace(heads=96)}, {"dtype": "fp8", "store": "fp8"},
        {"dtype": "fp32"}, {"dtype": "fp32", "store": "int8"},
        {"slopes": True}, {"function": "documents"}, {"function": "relative"}, {"aligned": False},
        {"block": 2}, {"arch": 100},
    )  # fmt: skip
    for changes in generic:
        call = latents._replace(**changes)
        assert prepared(call)[0].kernel.__name__ == "selected_decode"
        assert prepared(call._replace(kernel="list_blocks"))[0].arguments["PAGE"] is None


def test_few_are_built_in_ci_and_none_twice():
    few = distinct(cached_entries())
    assert len(few) < 90
    every = distinct((*few, *cached_calls(), *cached_product()))
    assert every[: len(few)] == few
    assert len({(str(build), build.arch) for build in every}) == len(every)
    assert distinct((*every, *few)) == every


def test_no_chip_reads_fp8_that_cannot():
    builds = (*cached_calls(), *cached_product())
    reads = [build for build in builds if build.kernel in ("decode", "selected_decode")]
    assert {build.arch for build in reads if build.store == "fp8"} == {90, 100, 120}


@pytest.mark.parametrize(
    "build",
    [
        *(
            DECODE._replace(dtype=dtype, store=store)
            for dtype in ("bf16", "fp16", "fp32")
            for store in ("", "int8")
        ),
        DECODE._replace(store="fp8", layer=MLA),
        DECODE._replace(layer=Layer(32, 192, 128), packed=True, tokens=3),
        WRITE._replace(store="int8", rope="half"),
        WRITE._replace(layer=MLA, rope="interleaved", packed=True),
    ],
    ids=str,
)
def test_a_launch_takes_what_the_build_says(build):
    launch, named = prepared(build)
    assert launch.kernel.__name__.startswith(build.kernel)
    new = named["q" if build.kernel == "decode" else "new_k"]
    assert new.dtype == DTYPES[build.dtype]
    assert new.shape[: 1 if build.packed else 2].numel() == build.sequences * build.tokens
    assert (named.get("k_scale") is not None) == bool(build.store)  # a kernel of 16 bits takes none
    assert build.kernel == "write" or (named["cu_seqlens_q"] is not None) == build.packed
    assert named["k"].dtype == DTYPES[build.store or build.dtype]
    assert named["k"].shape[-1] == build.layer.key
    assert all(x is None or x.is_meta for x in named.values())


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (DECODE, {"layer": GQA64}),
        (DECODE, {"layer": MLA}),
        (DECODE, {"dtype": "fp16"}),
        (DECODE._replace(dtype="fp32"), {"dtype": "tf32"}),
        (DECODE, {"store": "int8"}),
        (DECODE._replace(store="int8"), {"store": "fp8"}),
        (DECODE, {"page": 16}),
        (DECODE, {"page": 0}),
        (DECODE, {"tokens": 4}),
        (DECODE, {"packed": True}),
        (DECODE._replace(tokens=4), {"mask": "full"}),
        (DECODE._replace(tokens=4), {"mask": "sliding"}),
        (DECODE._replace(tokens=4), {"mask": "prefix"}),
        (DECODE, {"softcap": True}),
        (DECODE, {"slopes": True}),
        (DECODE, {"sinks": True}),
        (DECODE, {"aligned": False}),
        (DECODE, {"invariant": True}),
        (COMBINE._replace(layer=MLA), {"sequences": 1}),
        (COMBINE._replace(layer=MLA), {"arch": 80}),
        (COMBINE, {"kernel": "schedule"}),
        (LISTED, {"block": 32}),
        (LISTED, {"block": 1}),
        (LISTED, {"store": "int8"}),
        (LISTED, {"layer": MLA}),
        (LISTED, {"page": 16}),
        (LISTED, {"packed": True}),
        (WRITE, {"rope": "half"}),
        (WRITE._replace(rope="half"), {"rope": "interleaved"}),
        (WRITE, {"layer": MLA}),
        (WRITE, {"store": "int8"}),
        (WRITE, {"tokens": 4096}),
    ],
    ids=str,
)
def test_what_a_build_says_decides_what_is_compiled(base, changes):
    other = base._replace(**changes)
    assert distinct([base, other]) == [base, other]
    if "arch" not in changes:
        assert str(base) != str(other)


def test_how_many_sequences_there_are_compiles_nothing_new():
    assert distinct([DECODE, DECODE._replace(sequences=17)]) == [DECODE]


def test_chips_differ_in_how_many_splits_fill_them():
    builds = [CachedBuild("combine", arch, MLA, sequences=4) for arch in (86, 90)]
    assert [prepared(build)[0].arguments["AT_ONCE"] for build in builds] == [16, 32]  # of 84 and 132 splits


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"layer": MLA}, "decode_mla 16"),
        ({"layer": WIDE_MLA}, "decode_mla 64"),
        ({"layer": MLA, "tokens": 4}, "decode_mla 64"),
        ({"layer": WIDE_MLA, "page": 0}, "decode_mla 64"),
        ({"layer": WIDE_MLA, "page": 16}, "decode"),
        ({"layer": WIDE_MLA, "aligned": False}, "decode"),
        ({"layer": WIDE_MLA, "dtype": "fp32"}, "decode"),
        ({"layer": MLA, "store": "fp8"}, "decode_mla 16"),
        ({"layer": WIDE_MLA, "store": "int8", "page": 0}, "decode_mla 64"),
        ({"layer": MLA, "store": "int8", "page": 16}, "decode"),
        ({"layer": MLA, "store": "fp8", "dtype": "fp8"}, "decode"),
        ({"layer": MLA, "store": "int8", "invariant": True}, "decode"),
        ({"layer": MLA, "invariant": True}, "decode"),
        ({"layer": WIDE_MLA, "arch": 100}, "decode"),
        ({}, "decode_gqa 16"),
        ({"tokens": 8}, "decode_gqa 32"),
        ({"store": "int8"}, "decode_gqa 16"),
        ({"store": "fp8", "page": 0, "packed": True}, "decode_gqa 16"),
        ({"store": "fp8", "tokens": 5}, "decode"),
        ({"store": "int8", "layer": Layer(16, 128, 128)}, "decode"),
        ({"page": 0, "packed": True}, "decode_gqa 16"),
        ({"tokens": 9}, "decode"),
        ({"page": 1}, "decode"),
        ({"aligned": False}, "decode"),
        ({"layer": GQA64}, "decode"),
    ],
    ids=str,
)
def test_which_calls_hopper_has_kernels_for(changes, kernel):
    launch, _ = prepared(DECODE._replace(**changes))
    name, rows = launch.kernel.__name__, launch.arguments["BLOCK_M"]
    assert kernel == (name if name == "decode" else f"{name} {rows}")


@pytest.mark.parametrize("page", [64, 0])
def test_descriptors_of_stored_bytes(page):
    """A row of pairs for each token, and one row of all scales; of many rows of queries, those of neither."""
    for layer in (MLA, WIDE_MLA):
        launch, named = prepared(DECODE._replace(layer=layer, store="int8", page=page))
        tokens = named["k"].shape[:2].numel()
        shapes = {name: block.descriptor(named[block.tensor]).shape for name, block in launch.blocks.items()}
        of_few = {"k_desc": [tokens, 256], "scale_desc": [1, tokens]} if layer is MLA else {}
        assert shapes == {"tail_desc": [tokens, 64], **of_few}


def test_nothing_stays_replaced():
    call, processors = Launch.on, layouts.processors
    prepared(DECODE)
    with pytest.raises(ValueError, match=r"expected one that this call launches, .*decode.*, got prepare"):
        prepared(DECODE._replace(kernel="prepare"))
    assert Launch.on is call
    assert layouts.processors is processors
    assert layouts.processors(torch.device("cpu")) == layouts.INTERPRETED


def test_one_launch_is_compiled_for_two_chips():
    """Their plans are alike, and a plan launches again what it compiled first."""
    builds = [CachedBuild("write", arch, rope="half") for arch in (80, 90)]
    results = dict(check.apart(binary, builds, 1))
    assert all(16 <= results[build].registers <= 128 for build in builds)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (DECODE, "decode 32 x d128 bf16 causal"),
        (
            DECODE._replace(layer=Layer(8, 64, 32), page=0, mask="full"),
            "decode 8 x d64/32 bf16 full contiguous",
        ),
        (
            DECODE._replace(layer=MLA, store="int8", tokens=2, page=16, softcap=True, sinks=True),
            "decode 16 x d512+64 bf16 in int8 causal 2 tokens pages of 16, softcap sinks",
        ),
        (
            COMBINE._replace(layer=GQA128, packed=True, sequences=3),
            "combine 32 x d128 bf16 packed batch of 3",
        ),
        (COMBINE._replace(kernel="schedule", sequences=64), "schedule of 64"),
        (LISTED._replace(store="fp8"), "selected_decode 32 x d128 bf16 in fp8 causal blocks of 64"),
        (
            WRITE._replace(store="fp8", rope="half", aligned=False),
            "write 32 x d128 bf16 in fp8 half rope unaligned",
        ),
    ],
)
def test_builds_in_words(build, words):
    assert str(build) == words
