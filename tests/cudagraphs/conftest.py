"""Captures on the CPU: a recorder that stands in for CUDA graphs, and cuts that Inductor makes."""

import pytest
import torch

from .recorder import FakeRecorder


@pytest.fixture
def recorder():
    return FakeRecorder()


@pytest.fixture
def on_cpu(monkeypatch):
    """Have the `swa` backend capture CPU graphs with fake recorders; gives the list of them.

    Inductor cuts out everything that runs on the CPU. Here it keeps that, as it would on a GPU,
    except the assertions on sizes, which are no device code there either.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import Scheduler

    from swa_compile import capturing

    made = []

    def recorder_for(device):
        made.append(FakeRecorder())
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
