"""What CUDA graphs cost on a GPU, and say of it: copies, synchronization, memory, the record."""

import json
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.viewer.dump import Dump
from swa_compile.viewer.records import CAPTURES_FORMAT
from swa_compile.viewer.story import tell

from .paged_forward import LAYERS, OURS, compiled_pair, decode, extend, on_gpu

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("mode", OURS)
def test_steady_replays_copy_only_small_inputs_and_never_synchronize(mode):
    *_, compiled = compiled_pair(cudagraphs=mode)
    with torch.no_grad(), swa_compile.collect() as reports:
        keep = []
        for seed in range(6):
            compiled(*on_gpu(extend(8, seed), keep))
        captures = reports[0].captures
        copied, recaptured = captures.copied_inputs, captures.recaptured
        args = on_gpu(extend(8, 7), keep)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                compiled(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert captures.recaptured == recaptured
    # The six inputs of a call at most; nothing between the pieces.
    assert captures.copied_inputs - copied <= 3 * 6


def test_no_island_output_is_copied_in_the_steady_state():
    """The pool between the pieces gives the same addresses again."""
    *_, compiled = compiled_pair(cudagraphs="piecewise")
    args = on_gpu(extend(8, 0))
    with torch.no_grad(), swa_compile.collect() as reports:
        for _ in range(8):
            compiled(*args)
        captures = reports[0].captures
        before = captures.copied_inputs, captures.recaptured
        for _ in range(4):
            compiled(*args)
    assert (captures.copied_inputs, captures.recaptured) == before


def test_buckets_share_memory():
    """Row B52: a smaller size that is recorded later fits into what the larger one left."""
    *_, compiled = compiled_pair(cudagraphs="piecewise")
    with torch.no_grad(), swa_compile.collect() as reports:
        for n in (20, 20, 10, 10):
            compiled(*on_gpu(extend(n, n)))
    memory = reports[0].captures.memory
    assert set(memory) == {"20 tokens", "10 tokens"}
    assert 0 <= memory["10 tokens"] <= memory["20 tokens"]
    assert memory["20 tokens"] > 0


def test_a_graph_keeps_no_cache_alive():
    def forward(cache, x):
        cache[:4] = x
        return cache.sum()

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    cache, x = torch.zeros(1 << 20, 8, device="cuda"), torch.ones(4, 8, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(cache, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del cache
    assert before - torch.cuda.memory_allocated() >= 32 << 20


def test_the_dump_says_what_was_captured_and_a_replay_leaves_it_alone(tmp_path):
    *_, compiled = compiled_pair(cudagraphs="auto", dump_dir=str(tmp_path))
    with torch.no_grad(), swa_compile.collect() as reports:
        for n, make in [(4, decode), (8, extend)] * 3:
            compiled(*on_gpu(make(n, n)))
    report = reports[-1]  # the one for any number of requests; 1 may have had one of its own
    captures, folder = report.captures, Path(report.dump)
    said = json.loads((folder / "captures.json").read_text())
    around = {"format": CAPTURES_FORMAT, "time": said["time"], "further_sizes": 0}
    assert {**captures.to_dict(), **around} == said
    assert said["recorded"]["4 tokens"]["whole"] is True
    assert said["recorded"]["8 tokens"]["pieces"] == list(range(LAYERS + 1))
    pieces = [p for p in tell(Dump.read(folder))["pieces"] if "piece" in p]
    assert len(pieces) == LAYERS + 1 and all(p["line"] for p in pieces)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with torch.no_grad():
        for _ in range(3):
            compiled(*on_gpu(decode(4, 4)))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
