"""What importing costs: transformers is for those who use it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["swa_compile", "swa_compile.hf", "swa_compile.cli"])
def test_importing_does_not_import_transformers(module):
    code = f"import sys, {module}; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
