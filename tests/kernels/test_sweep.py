"""The shipped tiles over the sizes that other libraries sweep: any two levels of two factors meet in some
case.
"""

import pytest
import torch
from compiled.builds import pairwise
from helpers import OPTIONS, make
from kernel_helpers import INTERPRETED, assert_both

from attnlib import CAUSAL, FULL, Mask, sliding

FACTORS = {
    "d": (16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
    "lengths": (
        (97, 97), (128, 128), (200, 200), (257, 257), (1, 239), (239, 1), (3, 799), (113, 203), (203, 113),
        (127, 513), (1024, 1023), (1025, 1025),
    ),
    "heads": ((2, 2), (6, 1), (4, 2), (9, 3)),
    "mask": (CAUSAL, FULL, sliding(33), Mask(100, 57), Mask(None, -3, 11), Mask(-2, None)),
    "options": ((), ("softcap",), ("alibi_slopes",), ("sinks", "bounds"), ("dropout", "scale"), OPTIONS),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "value": ("alike", "half", "128"),
}  # fmt: skip


def name(case: dict) -> str:
    return "-".join(str(level).replace("torch.", "") for level in case.values())


@pytest.mark.parametrize(
    "case", () if INTERPRETED else pairwise(FACTORS), ids=name
)  # hours under the interpreter
def test_forward_and_backward(case):
    (s, t), (h, g), d = case["lengths"], case["heads"], case["d"]
    e = {"alike": d, "half": max(1, d // 2), "128": 128}[case["value"]]
    assert_both(make(2, s, t, h, g, d, e, mask=case["mask"], options=case["options"], dtype=case["dtype"]))
