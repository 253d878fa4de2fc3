"""`explain`, `collect` and the report: what a user reads."""

import json

import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc

MAPPING = torch.cat([torch.arange(96) % 24, torch.tensor([-1])])
LOC = torch.tensor([90, 41, -1])


def forward(mapping, loc, k, caches):
    for k_cache, v_cache in caches:
        store_kv(k_cache, v_cache, k, k, translate_loc(mapping, loc))


def arguments():
    caches = [(torch.zeros(24, 2, 4), torch.zeros(24, 2, 4)) for _ in range(2)]
    return MAPPING, LOC, torch.ones(3, 2, 4), caches


@pytest.mark.inductor
def test_explain_compiles_runs_and_reports():
    args = arguments()
    report = swa_compile.explain(forward, *args)

    (graph,) = report.graphs
    assert report.graph_breaks == 0
    assert (graph.translations_found, graph.translation_nodes) == (2, 1)
    assert graph.cache_copies == 0 and graph.partitions is None
    assert args[3][1][0][90 % 24].eq(1).all(), "the run is real"
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert "2 translations -> 1 node" in report.summary()
    assert "mapping[loc]" in report.summary()


@pytest.mark.inductor
def test_explain_compiles_anew_what_was_compiled_before():
    compiled = torch.compile(forward, backend="swa")
    compiled(*arguments())
    report = swa_compile.explain(compiled, *arguments())
    assert len(report.graphs) == 1


@pytest.mark.inductor
def test_explain_counts_graph_breaks():
    def broken(mapping, loc):
        first = translate_loc(mapping, loc) + 1
        torch._dynamo.graph_break()
        return first + translate_loc(mapping, loc)

    report = swa_compile.explain(broken, MAPPING, LOC)
    assert report.graph_breaks == 1
    assert [graph.translations_found for graph in report.graphs] == [1, 1]
    assert report.summary().startswith("2 graphs, 1 graph break\n")


def test_report_survives_json():
    torch._dynamo.reset()
    with swa_compile.collect() as reports, torch.no_grad():
        torch.compile(forward, backend="swa_eager", dynamic=True)(*arguments())
    (report,) = reports
    again = swa_compile.GraphReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert report.cache_copies is None


def test_the_backend_object_is_the_backend():
    torch._dynamo.reset()
    args = arguments()
    with swa_compile.collect() as reports, torch.no_grad():
        torch.compile(forward, backend=swa_compile.backend("swa_eager", lower_stores=False))(*args)
    assert reports[0].stores_lowered == 0 and reports[0].stores_found == 2


@pytest.mark.inductor
def test_a_mode_of_torch_compile_is_understood():
    torch._dynamo.reset()
    args = arguments()
    with swa_compile.collect() as reports, torch.no_grad():
        torch.compile(forward, backend="swa", mode="max-autotune-no-cudagraphs")(*args)
    assert reports[0].translation_nodes == 1


def test_training_graphs_run_backward():
    """A forward with gradients has stores and translations too; its values stay eager code's."""
    weight = torch.randn(8, 8, requires_grad=True)
    k_cache, v_cache = torch.zeros(24, 2, 4), torch.zeros(24, 2, 4)

    def step(mapping, loc, x):
        k = (x @ weight).view(3, 2, 4)
        slots = translate_loc(mapping, loc)
        store_kv(k_cache, v_cache, k.detach(), k.detach(), slots)
        return (k * slots[:, None, None]).sum()

    x = torch.randn(3, 8)
    torch._dynamo.reset()
    torch.compile(step, backend="swa_eager")(MAPPING, LOC, x).backward()
    got, weight.grad = weight.grad, None
    rows = k_cache.clone()
    step(MAPPING, LOC, x).backward()
    assert torch.allclose(got, weight.grad)
    assert torch.allclose(rows[1:], k_cache[1:])
