"""A recorder that stands in for CUDA graphs; `on_cpu` beside this folder has the backend use it."""

import pytest

from .recorder import FakeRecorder


@pytest.fixture
def recorder():
    return FakeRecorder()
