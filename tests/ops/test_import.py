"""The package works where Triton is not installed."""

import subprocess
import sys

SCRIPT = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())

import torch
from swa_compile import ops

mapping = torch.tensor([0, 2, 1, -1])
loc = ops.translate_loc(mapping, torch.tensor([1, 2]))
k_cache, v_cache = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2)
ops.store_kv(k_cache, v_cache, torch.ones(2, 1, 2), torch.ones(2, 1, 2), loc)
out = ops.paged_attention(
    torch.ones(1, 1, 2), k_cache, v_cache, torch.tensor([[2, 1]]), torch.tensor([2]),
    torch.tensor([0, 1]),
)
assert out.flatten().tolist() == [1.0, 1.0]
assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
"""


def test_nothing_needs_triton_on_a_cpu():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
