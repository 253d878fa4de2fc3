"""Tensor parallel: each rank has its KV heads, every collective stays, one node per rank."""

import pytest
import torch

from swa_compile.models.tensor_parallel import kv_heads_of

from .launch import launch
from .oracle import close, same_rows, whole_run
from .programs import steps

SLIDING = ("swa", "swa")  # Inductor compiles each kernel of each layer with a C++ compiler


def watched(layers):
    """One collective in front, then one behind attention and MLP of each layer."""
    return ["all_gather_into_tensor"] + ["all_reduce"] * (2 * len(layers))


def check(results, kv_heads=4, layers=steps.CONFIG.layers, atol=1e-5):
    """Logits of every step and every row of every cache, against the whole model on one process."""
    ranks = len(results)
    logits, caches, mapping = whole_run(kv_heads=kv_heads, layers=layers)
    for rank, got in enumerate(results):
        close(got["logits"], logits, 2 * atol)
        own = kv_heads_of(kv_heads, rank, ranks)
        assert got["kv_heads"] == [len(own)] * len(layers)
        want = [tuple(cache[:, own.start : own.stop] for cache in layer) for layer in caches]
        same_rows(got["rows"], want, atol)
        assert torch.equal(got["mapping"], mapping)  # replicated: no rank has slots of its own


def check_reports(results, layers):
    """One compilation for all steps, one node for both sliding layers, equal on every rank."""
    for got in results:
        (report,) = got["reports"]
        assert (report["translations_found"], report["translation_nodes"]) == (4, 1)
        assert (report["translations_left"], report["refused"]) == (0, [])
        assert report["stores_found"] == report["stores_lowered"] == len(layers)
        found = {value["loc"]: value["uses"] for value in report["values"]}
        assert found == {"batch.out_cache_loc": 2, "batch.page_table": 2}
    assert len({got["identity"] for got in results}) == 1


def test_functional_collectives_on_four_ranks_keep_rows_and_order(tmp_path):
    """Row B58 on real ranks: the first collective of the graph has a result that nobody reads."""
    results = launch(
        "tensor_parallel",
        4,
        tmp_path,
        form="functional",
        engine="swa_eager",
        dump_dir=str(tmp_path / "dumps"),
    )
    check(results)
    check_reports(results, steps.CONFIG.layers)
    for got in results:
        (stages,) = got["collectives"]
        assert set(stages) == {"00-functional.py", "01-hoisted.py", "02-lowered.py"}
        assert all(found == watched(steps.CONFIG.layers) for found in stages.values()), stages


@pytest.mark.inductor
def test_dtensor_and_inductor_keep_every_collective_with_the_micro_pipeline_asked_for(tmp_path):
    """What Inductor generates is counted, too. Its async tensor-parallel pass is left what it
    looks for (it rewrites nothing without symmetric memory)."""
    results = launch(
        "tensor_parallel",
        2,
        tmp_path,
        timeout=300,
        form="dtensor",
        engine="swa",
        dump_dir=str(tmp_path / "dumps"),
        options={"inductor": {"_micro_pipeline_tp": True}, "strict": True},
        layers=SLIDING,
        cache_dir=str(tmp_path / "cache"),
    )
    check(results, layers=SLIDING)
    check_reports(results, SLIDING)
    for got in results:
        assert got["reports"][0]["cache_copies"] == 0
        (stages,) = got["collectives"]
        assert "03-inductor.py" in stages
        assert all(found == watched(SLIDING) for found in stages.values()), stages


def test_more_ranks_than_kv_heads_hold_the_same_head(tmp_path):
    """What sharding alone does: eager, four ranks, two KV heads."""
    check(launch("tensor_parallel", 4, tmp_path, form="functional", kv_heads=2), kv_heads=2)


def test_heads_that_ranks_cannot_share_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="6 KV heads cannot be divided among 4 ranks"):
        kv_heads_of(6, 0, 4)
