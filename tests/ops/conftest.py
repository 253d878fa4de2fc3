"""Triton kernels on any machine."""

import importlib.util
from pathlib import Path

import pytest
import torch

from swa_compile import ops


@pytest.fixture
def kernels(monkeypatch):
    """Loads a module of kernels. Without a GPU it is a copy of its own, made for the interpreter:
    Triton decides when a kernel is decorated."""
    pytest.importorskip("triton")

    def load(name):
        if torch.cuda.is_available():
            return importlib.import_module(f"swa_compile.ops.{name}")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        path = Path(ops.__file__).parent / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"swa_compile.ops.interpreted_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
