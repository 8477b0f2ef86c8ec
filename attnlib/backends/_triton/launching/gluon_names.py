"""The Gluon names that the dedicated Hopper kernels use, and a check that the installed Triton has them.

Gluon, Triton's lower-level language, is experimental: a new version may rename functions, methods or keyword
arguments. ``kernels/hopper/primitives.py`` adapts to the known differences between versions. This module
checks all other names.
"""

import inspect
from importlib import import_module
from pkgutil import resolve_name
from types import MappingProxyType

GLUON = "triton.experimental.gluon.language"
HOPPER = f"{GLUON}.nvidia.hopper"
# For each module or class, the names that the kernels use from it, with keyword arguments in brackets.
# test_gluon_names.py compares this list with the kernels.
NAMES = MappingProxyType(
    {
        "triton.experimental.gluon": "constexpr_function jit(do_not_specialize)",
        "triton.experimental.gluon.nvidia.hopper": "TensorDescriptor",
        GLUON: """
            BlockedLayout DotOperandLayout(k_width,operand_index,parent) NVMMADistributedLayout
            NVMMASharedLayout SliceLayout SwizzledSharedLayout allocate_shared_memory arange atomic_add
            atomic_xchg bfloat16 broadcast cdiv constexpr convert_layout exp2 expand_dims float16 float32
            float8e4nv full inline_asm_elementwise(dtype,is_pure,pack) int16 int32 int64 int8 join
            load(mask,other) log2 max maximum minimum multiple_of num_programs num_warps pointer_type
            program_id shared_memory_descriptor static_range store(mask) sum tensor tuple uint32
            warp_specialize where zeros zeros_like
        """,
        f"{GLUON}.NVMMASharedLayout": "get_default_for",
        f"{GLUON}.shared_memory_descriptor": "index load permute reshape slice store",
        f"{GLUON}.tensor": "permute reshape split to",
        f"{GLUON}.nvidia.ampere": "async_copy mma_v2",
        f"{GLUON}.nvidia.ampere.async_copy": "mbarrier_arrive(increment_count)",
        HOPPER: "fence_async_shared mbarrier tma warpgroup_mma(is_async,use_acc) warpgroup_mma_wait(deps)",
        f"{HOPPER}.mbarrier": "MBarrierLayout arrive(count) expect init wait(pred)",
        f"{HOPPER}.tma": "store_wait",
        "triton.language.extra.cuda": "gdc_launch_dependents gdc_wait",
    }
)


def missing_names() -> list[str]:
    """Return the names that the Hopper kernels need but this Triton lacks; an empty list if it has all.

    A missing keyword argument is listed as ``function(keyword=)``. This function never raises an error: an
    error while importing Triton counts as a missing name.
    """
    missing = [name for of, names in NAMES.items() for word in names.split() for name in _lacking(of, word)]
    if not missing:
        try:
            import_module("attnlib.backends._triton.kernels.hopper.primitives")
        except Exception as error:  # its message names what is missing
            missing.append(str(error))
    return missing


def _lacking(of: str, word: str) -> list[str]:
    """Return the missing part of an entry of ``NAMES``: the name itself, or some keyword arguments."""
    name, _, keywords = word.removesuffix(")").partition("(")
    try:
        found = resolve_name(f"{of}.{name}")
        taken = inspect.signature(getattr(found, "fn", found)).parameters if keywords else {}
    except Exception:  # an import may raise anything
        return [f"{of}.{name}"]
    if any(x.kind is x.VAR_KEYWORD for x in taken.values()):
        return []
    return [f"{of}.{name}({x}=)" for x in keywords.split(",") if x and x not in taken]
