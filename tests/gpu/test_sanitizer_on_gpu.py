"""compute-sanitizer finds nothing in the Triton kernels: no bad address, no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swa_compile.ops.library import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
PROGRAM = Path(__file__).parent / "kernels_alone.py"


def sanitized(tool, *program):
    if not Path(SANITIZER).exists():
        pytest.skip("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    return subprocess.run(
        [SANITIZER, *options, sys.executable, *map(str, program)],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_kernel_of_ours_is_reported(tool):
    run = sanitized(tool, PROGRAM)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "all kernels ran" in run.stdout


def test_a_read_past_the_end_would_be():
    """The sanitizer sees what the tests above look for."""
    program = (
        "import torch\n"
        "x = torch.zeros(4, device='cuda')\n"
        "wide = torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, 1 << 20)\n"
        "past = torch.empty(0, device='cuda').set_(wide, 0, (100000,), (1,))\n"
        "past + 1; torch.cuda.synchronize()\n"
    )
    run = sanitized("memcheck", "-c", program)
    assert run.returncode == 9, run.stdout[-3000:] + run.stderr[-2000:]
    assert "Invalid __global__ read" in run.stdout
