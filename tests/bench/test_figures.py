"""The further figures, each measured once in small."""

import pytest
import torch

from swa_compile.bench import depth, pass_time, prefetch, prologue, sizes, start, stores
from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.profiling import kind_of
from swa_compile.bench.steps import measure
from swa_compile.bench.variants import chosen
from swa_compile.ops import store_kv

CPU = torch.device("cpu")
SMALL = CONFIGS["small"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_index_put_mm_3", "generated"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "gemm"),
        ("void gemmk1_kernel<int>", "gemm"),
        ("attend", "attention"),
        ("merge", "attention"),
        ("rows", "fused rows"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("_store", "store"),
        ("_translate", "translation"),
        ("Memset (Device)", "memset, memcpy"),
        ("Memcpy DtoD (Device -> Device)", "memset, memcpy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


def test_stores_of_other_rows_are_refused():
    with torch.no_grad():
        layer = stores.Operands.make(SMALL, 4, CPU)
        layer.expect(layer.forward(store_kv))

        def next_row(k_cache, v_cache, k, v, loc):
            store_kv(k_cache, v_cache, k, v, loc % 100 + 1)

        with pytest.raises(RuntimeError, match="the rows of K are not what eager code stores"):
            layer.expect(layer.forward(next_row))


@pytest.mark.slow
@pytest.mark.inductor
def test_stores_alone_are_timed_by_every_way():
    row = stores.measure(4, CPU, compilations=1, runs=2, config=SMALL)
    assert list(row["ways"]) == ["no store", "opaque store", "aten store", "ours 1"]
    ours = row["ours_us"]
    assert 0 < ours["min"] <= ours["median"] <= ours["max"]


@pytest.mark.inductor
def test_the_prologue_is_held_against_a_copy():
    row = prologue.measure(4, 256, CPU, runs=3)
    assert list(row["tables"]) == ["runs of 64 ids", "ids at random"]
    for entry in row["tables"].values():
        assert entry["ratio"]["median"] > 0 and entry["us"]["median"] > 0
    assert row["table_mb"] == 0.004 and row["copy_tb_per_s"] > 0


def test_tables_are_of_ids_one_after_another_and_of_ids_at_random():
    in_runs, at_random = prologue.tables(3, 200, 1000, torch.Generator().manual_seed(0)).values()
    for table in (in_runs, at_random):
        assert table.shape == (3, 200) and table.dtype == torch.int32 and table.is_contiguous()
        assert table.min() >= 0 and table.max() < 1000
    steps = in_runs[:, :192].reshape(3, 3, 64).diff(dim=-1)
    assert (steps == 1).all()
    assert (at_random.diff(dim=-1) == 1).float().mean() < 0.1


@pytest.mark.slow
@pytest.mark.inductor
def test_a_warm_start_finds_what_the_cold_one_compiled():
    row = start.measure(SMALL, Shape.of(SMALL, 2), CPU)
    assert not row["cold"]["from_cache"] and row["warm"]["from_cache"]
    assert row["warm"]["passes_s"] == 0 < row["cold"]["passes_s"]
    assert 0 < row["passes_share"] < 0.5 and row["ratio"] < 1
    plain = row["plain"]
    assert 0 < plain["warm"]["seconds"] < plain["cold"]["seconds"]
    assert plain["cold"]["passes_s"] == 0, "none of our passes ran"


@pytest.mark.slow
@pytest.mark.inductor
def test_what_was_compiled_ahead_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    shape, variants = Shape.of(SMALL, 3), chosen(["inductor-hoisted", "swa"])
    assert prefetch.prefetch(SMALL, shape, variants, CPU, jobs=2) == []
    found = measure(SMALL, shape, variants, CPU, runs=2)["variants"]
    assert found["swa"]["report"]["from_cache"]
    assert found["inductor-hoisted"]["status"] == found["swa"]["status"] == "ok"


@pytest.mark.slow
@pytest.mark.inductor
def test_kernels_that_read_the_mapping_do_not_grow_with_the_layers():
    counts = [entry["mapping_kernels"] for entry in depth.measure((1, 3), CPU)["depths"]]
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
@pytest.mark.inductor
def test_marked_sizes_compile_once():
    counts = sizes.measure(CPU, sizes=(0, 1, 8))["compilations"]
    assert counts["mark_sizes"] == 1 < counts["default"]


def test_the_passes_are_timed_by_graph_size():
    small, large = pass_time.measure((1, 4))["depths"]
    assert large["nodes"] > 3 * small["nodes"] > 0
    assert large["passes_s"] > 0
