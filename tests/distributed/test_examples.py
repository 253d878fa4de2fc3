"""The examples run as their first lines say, without Inductor, which other tests compile with."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from .launch import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(example, *arguments, timeout=240):
    """What the ranks print; the whole process group is killed when time is up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / example), *arguments]
    environment = {name: text for name, text in ENVIRONMENT.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed
    return printed


def test_the_tensor_parallel_example_agrees_with_the_whole_model():
    printed = torchrun("tp.py", "--backend", "swa_eager")
    assert "4 translations -> 1 node" in printed
    assert "tokens equal: True; cache rows equal: True" in printed


def test_the_data_parallel_example_runs_with_an_idle_rank():
    printed = torchrun("dp.py", "--backend", "swa_eager")
    assert "4 translations -> 1 node" in printed
    assert "rank 0: 1 requests, padded to [16, 4, 4, 4, 4, 4], tokens equal: True" in printed
    assert "rank 1: 0 requests, padded to [16, 4, 4, 4, 4, 4], tokens equal: True" in printed
