"""Recorders that stand in for CUDA graphs; `on_cpu` beside this folder has the backend use them."""

import pytest

from swa_compile import runner as runner_module

from .recorder import FakeRecorder


@pytest.fixture
def recorder():
    return FakeRecorder()


@pytest.fixture
def recorders(monkeypatch):
    """Have each `BucketRunner` record with one of its own; gives the list of them."""
    made = []

    def recorder_for(device):
        made.append(FakeRecorder())
        return made[-1]

    monkeypatch.setattr(runner_module, "recorder_for", recorder_for)
    return made
