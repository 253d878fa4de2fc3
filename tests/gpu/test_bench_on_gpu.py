"""The benchmark on a GPU, small: captured variants are checked, timed and profiled."""

from dataclasses import replace

import pytest
import torch

from swa_compile.bench import prologue, stores
from swa_compile.bench.checking import Oracle, WrongVariant
from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.graphs import captured
from swa_compile.bench.inputs import Setting
from swa_compile.bench.model import natural
from swa_compile.bench.prefetch import default_jobs
from swa_compile.bench.steps import measure
from swa_compile.bench.variants import chosen

# Head dimensions that any attention kernel takes.
CONFIG = replace(
    CONFIGS["small"], d_model=256, head_dim=64, mlp_width=512, sinks=True, dtype=torch.bfloat16
)


def test_captured_variants_have_gpu_times_and_launches():
    device = torch.device("cuda")
    row = measure(CONFIG, Shape.of(CONFIG, 8), chosen(["a", "e", "f", "swa"]), device, runs=5)
    for name, entry in row["variants"].items():
        assert entry["status"] == "ok", (name, entry["reason"])
        assert 0 < entry["gpu_ms"]["median"] < 100 and len(entry["gpu_ms"]["samples"]) == 5
        assert entry["wall_ms"]["median"] > 0
        assert entry["kernels"]["launches"] >= 2 * len(CONFIG.layers), name
    kinds = row["variants"]["swa"]["kernels"]["kinds"]
    assert {"gemm", "generated"} <= set(kinds)
    assert row["variants"]["swa"]["report"]["cache_copies"] == 0


def test_a_graph_that_holds_on_to_indices_is_found():
    with torch.no_grad():
        setting = Setting.make(CONFIG, Shape.of(CONFIG, 8), torch.device("cuda"))
        oracle = Oracle(setting)
        live = captured(lambda: setting.decoder(setting.x, setting.batch))
        oracle.check(live)
        kept = tuple(value.clone() for value in natural(setting.batch)())
        stale = captured(
            lambda: setting.decoder(setting.x, setting.batch, lambda batch: lambda: kept)
        )
        with pytest.raises(WrongVariant):
            oracle.check(stale)


def test_stores_alone_and_the_prologue_are_measured():
    device = torch.device("cuda")
    row = stores.measure(8, device, compilations=1, runs=3, config=CONFIG)
    assert row["ways"]["ours 1"]["clock"] == "gpu"
    assert 1 <= row["ways"]["ours 1"]["launches"] <= 6
    table = prologue.measure(8, 4096, device, runs=3)
    assert table["clock"] == "gpu" and len(table["tables"]) == 2
    for measured in table["tables"].values():
        assert measured["kernels"]["launches"] >= 1


def test_room_for_processes_that_compile_ahead_is_counted():
    assert default_jobs(CONFIGS["ref24"], torch.device("cuda")) >= 1
