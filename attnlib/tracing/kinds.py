"""Types of numbers in mask and score functions ("kinds"), promoted like 0-dimensional torch tensors.

Bools and integers keep their dtype. All floats have the same kind; they are computed in fp32, or in fp64 in
score functions if q is fp64.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT = KINDS = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float",
)
BITS = MappingProxyType({UINT8: 8, INT8: 8, INT16: 16, INT32: 32, INT64: 64})  # width of each integer kind
DTYPES = MappingProxyType({kind: getattr(torch, kind) for kind in (BOOL, *BITS)})
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PAIRS = tuple(DTYPES.items())
BITWISE = ("bitand", "bitor", "bitxor", "bitnot", "lshift", "rshift")
TRANSCENDENTAL = ("exp", "exp2", "log", "tanh", "sigmoid")
# Each operation has three properties: the number of operands, the kind to which they are converted (None for
# torch's promotion), and the kind of the result (None for the kind of the operands).
OPERATIONS = MappingProxyType(
    {
        **dict.fromkeys(("add", "sub", "mul", "floordiv", "mod", "minimum", "maximum"), (2, None, None)),
        **dict.fromkeys(("clamp_min", "clamp_max"), (2, None, None)),
        **dict.fromkeys(("neg", "abs"), (1, None, None)),
        **dict.fromkeys(BITWISE, (2, None, None)),
        "bitnot": (1, None, None),
        **dict.fromkeys(("truediv", "pow"), (2, FLOAT, FLOAT)),
        **dict.fromkeys((*TRANSCENDENTAL, "sqrt", "rsqrt"), (1, FLOAT, FLOAT)),
        **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (2, None, BOOL)),
        **dict.fromkeys(("logical_and", "logical_or"), (2, BOOL, BOOL)),
        "logical_not": (1, BOOL, BOOL),
    }
)
# Torch supports few operations on bools; if all operands are bools, use these operations instead.
OF_BOOLS = MappingProxyType(
    {"add": "logical_or", "mul": "logical_and", "minimum": "logical_and", "maximum": "logical_or"}
    | {"clamp_min": "logical_or", "clamp_max": "logical_and"}
    | {"bitand": "logical_and", "bitor": "logical_or", "bitxor": "ne", "bitnot": "logical_not"}
)


def kind_of(dtype: object) -> str | None:
    """Return the kind of a dtype, or None; this is a loop since Dynamo may lose track of a mapping."""
    for kind, known in _PAIRS:
        if dtype == known:
            return kind
    return FLOAT if dtype in FLOATS else None


def limits(kind: str) -> tuple[int, int]:
    """Return the smallest and the largest integer that a kind can hold; for bools, these are 0 and 1."""
    if kind in (BOOL, UINT8):
        return 0, 1 if kind == BOOL else 255
    return -(1 << (BITS[kind] - 1)), (1 << (BITS[kind] - 1)) - 1


def fits(x: int, kind: str) -> bool:
    """True if a kind can hold the integer ``x``; the float kind holds any integer, rounded."""
    return kind == FLOAT or limits(kind)[0] <= x <= limits(kind)[1]


def wrapped(x: int, kind: str) -> int:
    """Wrap an integer into the range of an integer kind, as torch's casts do."""
    least = limits(kind)[0]
    return (x - least) % (1 << BITS[kind]) + least


def promoted(kinds: Sequence[str], constants: Sequence[bool | int | float]) -> str:
    """Return the kind that an operation converts its operands to, given their kinds and Python constants.

    As in torch, a constant only matters if it is a float among integers, or a number among bools.
    """
    found = BOOL
    for kind in kinds:
        found = INT16 if {found, kind} == {UINT8, INT8} else max(found, kind, key=KINDS.index)
    for x in constants:
        if isinstance(x, float):
            found = FLOAT
        elif not isinstance(x, bool) and found == BOOL:
            found = INT64
    return found
