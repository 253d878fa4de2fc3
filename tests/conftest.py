"""What tests of several folders use: on the CPU, what the passes and captures do on a GPU."""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture
def gpu_form(monkeypatch):
    """Have the passes give graphs on the CPU the form for GPUs: no look at ids, rows fused."""
    for name in ("lower", "materialize"):
        module = importlib.import_module(f"swa_compile.passes.{name}")
        monkeypatch.setattr(module, "checked_on_the_host", lambda ids: False)
    module = importlib.import_module("swa_compile.passes.fuse_rows")
    monkeypatch.setattr(module, "worthwhile", lambda node: True)


@pytest.fixture
def on_cpu(monkeypatch):
    """Have the `swa` backend capture CPU graphs with fake recorders; gives the list of them.

    Inductor cuts out everything that runs on the CPU. Here it keeps that, as it would on a GPU,
    except the assertions on sizes, which are no device code there either.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import Scheduler

    from swa_compile import capturing

    fake_recorder = _fake_recorder()
    made = []

    def recorder_for(device):
        made.append(fake_recorder())
        return made[-1]

    should_partition = Scheduler.should_partition

    def as_on_a_gpu(self, node):
        why = should_partition(self, node)
        device_code = why == "cpu ops" and not isinstance(node.node, ir.AssertScalar)
        return None if device_code else why

    monkeypatch.setattr(Scheduler, "should_partition", as_on_a_gpu)
    monkeypatch.setattr(capturing, "recorder_for", recorder_for)
    monkeypatch.setattr(capturing, "_device", lambda values: torch.device("cpu"))
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        yield made
    torch._dynamo.reset()


def _fake_recorder():
    # The folders of tests are packages of their own, so there is no name to import this by.
    path = Path(__file__).parent / "cudagraphs" / "recorder.py"
    spec = importlib.util.spec_from_file_location("fake_recorder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeRecorder
