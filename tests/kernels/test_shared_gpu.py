"""Kernels while another process computes on the same GPU, which then stops them midway to take turns.

Once, an mbarrier that nobody used shared its room with what a program hands to its warps, and was written
after it: one program in thousands read a wrong sequence, and only where a GPU was shared.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_helpers import INTERPRETED
from shared_gpu import CASES

SCRIPT = Path(__file__).parents[1] / "helpers" / "shared_gpu.py"

if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_who_else_computes(case):
    paths = [str(SCRIPT.parent), str(SCRIPT.parents[1]), str(SCRIPT.parents[2])]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {paths}; from shared_gpu import main; main({case!r})",
    ]
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        said = child.stdout.readline()
        while child.poll() is None:
            for _ in range(10):
                x @ x
            torch.cuda.synchronize()
        said += child.stdout.read()
    assert child.returncode == 0, said
