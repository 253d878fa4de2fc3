"""GPU tests: skipped, with the reason, where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here")
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(skip)


@pytest.fixture
def fresh():
    """Nothing compiled before or after; a fault of a kernel shows in the test that ran it."""
    torch._dynamo.reset()
    yield
    torch.cuda.synchronize()
    torch._dynamo.reset()
