"""The rooms of the package from top to bottom, and the rooms that each may import.

docs/files.py makes the import table of docs/internals.md from them.
"""

VALUES = (
    "merge", "fp8", "gate", "kv", "masks", "scores", "tracing", "scaling", "rope", "internal",
)  # fmt: skip
BACKENDS = ("backends/_triton", "backends/_torch", "backends/_reference")
# Of Hopper kernels. None imports another, but selected_latents the consumers of mla_decode.
FAMILIES = ("selected_latents", "forward", "backward", "mla_decode", "gqa_decode")
HOPPER = "backends/_triton/kernels/hopper"
UNDER_FAMILIES = (HOPPER, "backends/_triton/kernels")
UNDER_PLANS = (
    "backends/_triton/functions",
    "backends/_triton/launching",
    "backends/_triton/kernels",
    "backends",
    "call",
)
CACHES = ("cache/kv_cache", "cache")
OVER_LAYERS = ("layers", *CACHES, "functional", "weights", "sizes", *VALUES)
RUNNING = ("dispatch/run", "dispatch/storage", "packing")
# A room may import only rooms below it. bench imports what users do.
ROOMS = {
    "__main__": {"__init__", "bench", "finetune", "convert", "sizes", "doctor"},
    # In blocks, other libraries answer the calls of layers.
    "bench": {"__init__", "call", "dispatch/run", "parallel", "packing", "masks", "internal"},
    "doctor": {"__init__"},
    "__init__": {
        "layers",
        "cache",
        "cache/kv_cache",
        "functional",
        "indexing",
        "weights",
        "dispatch",
        "dispatch/warnings",
        "merge",
        "kv",
        "scores",
        "masks",
        "packing",
        "tracing",
        "rope",
        "scaling",
        "fp8",
        "gate",
        "integrations",
        "internal",
    },
    "finetune": {"convert", "indexing", "checkpoint_files", "models", *VALUES},
    "parallel": {*OVER_LAYERS, *RUNNING, "call"},
    "convert": {"integrations", *OVER_LAYERS, "checkpoint_files", "models"},
    "compat": {*OVER_LAYERS, *RUNNING, "call"},
    "integrations": {*OVER_LAYERS, *RUNNING, "indexing", "checkpoint_files", "models"},
    "qk_clip": {"layers", "dispatch/statistics", "dispatch/run", "call", *VALUES},
    "layers": {
        *(
            "functional",
            "weights",
            "indexing",
            "dispatch/warnings",
            "dispatch/statistics",
            "dispatch/run",
            "call",
        ),
        *(*CACHES, *VALUES),
    },
    "cache/kv_cache": {"cache/sharded", "cache/prefixes", "cache", *VALUES},
    "cache/sharded": {"cache", "dispatch/storage", "dispatch", "call", *VALUES},
    "cache/prefixes": {"cache", "dispatch", "call", *VALUES},
    "cache": {"dispatch/storage", *VALUES},
    "indexing": {"dispatch/statistics", "dispatch", "call", *VALUES},
    "functional": {"dispatch/run", "dispatch", "dispatch/warnings", "call", *VALUES},
    "weights": {"dispatch/statistics", "call", *VALUES},
    "dispatch/warnings": {"call", *VALUES},
    "dispatch/statistics": {
        "dispatch/run",
        "dispatch/placements",
        "dispatch/storage",
        "dispatch",
        "call",
        *VALUES,
    },
    "dispatch/run": {"dispatch/placements", "dispatch", "call", *VALUES},
    "dispatch/placements": {"call", *VALUES},
    "dispatch/storage": {"dispatch", "call", *VALUES},
    "dispatch": {*BACKENDS, "backends", "call", "internal"},
    "backends/_triton": {
        *(
            "backends/_triton/dense",
            "backends/_triton/decode",
            "backends/_triton/launching",
            "backends",
            "call",
        ),
        *VALUES,
    },
    "backends/_triton/dense": {
        *UNDER_PLANS,
        *(f"{HOPPER}/{family}" for family in ("selected_latents", "forward", "backward")),
        *VALUES,
    },
    "backends/_triton/decode": {
        *UNDER_PLANS,
        *(f"{HOPPER}/{family}" for family in ("selected_latents", "mla_decode", "gqa_decode")),
        *VALUES,
    },
    "backends/_triton/functions": {
        "backends/_triton/launching",
        "backends/_triton/kernels",
        "backends",
        *VALUES,
    },
    "backends/_triton/launching": {*UNDER_FAMILIES, "backends", *VALUES},
    **{f"{HOPPER}/{family}": {*UNDER_FAMILIES} for family in FAMILIES},
    f"{HOPPER}/selected_latents": {f"{HOPPER}/mla_decode", *UNDER_FAMILIES},
    HOPPER: {"backends/_triton/kernels"},
    "backends/_triton/kernels": set(),
    "backends/_torch": {"backends", "call", *VALUES},
    "backends/_reference": {"backends", "call", "reference", *VALUES},
    "backends": {"call", *VALUES},  # what all backends share
    "call": {*VALUES},
    "sizes": {*VALUES},
    "checkpoint_files": set(),  # below both who converts a folder and who loads it: there is one reader
    "models": set(),
    "reference": set(),
    "packing": {*VALUES},
    **{name: set(VALUES[at + 1 :]) for at, name in enumerate(VALUES)},
}
ORDER = list(ROOMS)
