"""The pipeline as Inductor's pass, on its own and under the backends."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc

LOC = torch.tensor([90, 41, -1, 77, 30])


def rows(n, seed=1):
    return torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(seed))


def counts(report):
    return (
        report.translations_found,
        report.translation_nodes,
        report.translations_left,
        len(report.values),
        report.stores_found,
        report.stores_lowered,
        report.invariants_hoisted,
    )


@pytest.mark.inductor
def test_stock_inductor_with_the_pipeline_alone_gives_the_same_counts(
    compiled, make_mapping, make_caches, oracle
):
    mapping, k = make_mapping(), rows(5)

    def build(caches):
        def forward(mapping, loc, k):
            for k_cache, v_cache in caches:
                store_kv(k_cache, v_cache, k * 2, k + 1, translate_loc(mapping, loc))

        return forward

    seen = {}
    for engine in ("swa_eager", "swa", "pipeline"):
        caches, before = make_caches(3), make_caches(3)
        forward = build(caches)
        if engine == "pipeline":
            torch._dynamo.reset()
            with torch.no_grad(), swa_compile.collect() as reports:
                torch.compile(
                    forward, options={"post_grad_custom_pre_pass": swa_compile.passes.pipeline()}
                )(mapping, LOC, k)
        else:
            _, reports = compiled(forward, mapping, LOC, k, engine=engine)
        (report,) = reports
        seen[engine] = counts(report)
        ids = oracle.translate(mapping, LOC)
        for cache, old in zip(caches, before, strict=True):
            oracle.same_rows(cache[0], oracle.store(old[0], ids, k * 2))
            oracle.same_rows(cache[1], oracle.store(old[1], ids, k + 1))
    assert seen["swa"] == seen["swa_eager"] == seen["pipeline"]
    assert seen["swa"][:3] == (3, 1, 0)


@pytest.mark.inductor
def test_46_layers_store_through_one_loc_buffer(make_mapping, oracle):
    """Counted in the generated code: one buffer holds the rows of all 46 stores, and the mapping
    goes to one kernel."""
    from torch._inductor.utils import run_and_get_code

    mapping, k = make_mapping(), rows(5)
    caches = [(torch.zeros(24, 2, 4), torch.zeros(24, 2, 4)) for _ in range(46)]
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(4)) / 4

    def forward(mapping, loc, k):
        for k_cache, v_cache in caches:
            k = (k.flatten(1) @ weight).view(5, 2, 4)
            store_kv(k_cache, v_cache, k, k, translate_loc(mapping, loc))
        return k

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        _, (code,) = run_and_get_code(torch.compile(forward, backend="swa"), mapping, LOC, k)

    assert counts(reports[0])[:2] == (46, 1)
    assert reports[0].stores_lowered == 46
    assert reports[0].mapping_kernels == 1
    call = code[code.index("def call(") : code.index("def benchmark_compiled_module")]
    # The graph input of the mapping's size goes to one kernel call; its rows come from one buffer.
    (name,) = re.findall(r"assert_size_stride\((arg\d+_1), \(97, \), \(1, \)", call)
    users = [line for line in call.splitlines() if re.search(rf"\bcpp_fused.*\b{name}\b", line)]
    assert len(users) == 1
    assert len(re.findall(r"= empty_strided_cpu\(\(5, \), \(1, \), torch.int64\)", call)) <= 1
    assert call.count("= torch.ops.swa.check_ids") == 2  # the ids that come in, the rows
    ids = oracle.translate(mapping, LOC)
    for cache, _ in caches[:1]:
        want = oracle.store(np.zeros((24, 2, 4)), ids, (k.flatten(1) @ weight).view(5, 2, 4))
        assert np.allclose(np.asarray(cache)[1:], want[1:], atol=1e-6)


WARM = """
import json, sys, torch, swa_compile
from swa_compile.ops import store_kv, translate_loc

caches = [(torch.zeros(24, 2, 4), torch.zeros(24, 2, 4)) for _ in range(2)]
mapping = torch.cat([torch.arange(96) % 24, torch.tensor([-1])])

def forward(mapping, loc, k):
    for k_cache, v_cache in caches:
        store_kv(k_cache, v_cache, k, k, translate_loc(mapping, loc))

options = {"post_grad_custom_pre_pass": swa_compile.passes.pipeline()}
with torch.no_grad(), swa_compile.collect() as reports:
    if sys.argv[1] == "swa":
        call = torch.compile(forward, backend="swa")
    else:
        call = torch.compile(forward, options=options)
    call(mapping, torch.tensor([90, 41]), torch.ones(2, 2, 4))
rows = sorted({i for k, v in caches for i in k.flatten(1).any(1).nonzero().flatten().tolist()})
print(json.dumps([[report.to_dict() for report in reports], rows]))
"""


@pytest.mark.inductor
@pytest.mark.parametrize("engine", ["swa", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_second_process_hits_the_cache_and_still_reports(engine, tmp_path):
    script = tmp_path / "warm.py"
    script.write_text(textwrap.dedent(WARM))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run():
        done = subprocess.run(
            [sys.executable, str(script), engine],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        reports, written = json.loads(done.stdout.splitlines()[-1])
        assert written == [17, 18]
        (report,) = reports
        return report

    cold, warm = run(), run()

    assert (cold["from_cache"], warm["from_cache"]) == (False, True)
    assert warm["translations_found"] == 2 and warm["translation_nodes"] == 1
    if engine == "pipeline":  # it does not see the graph that has this process's lines
        assert all(value.pop("source") for value in cold["values"])
        assert not any(value.pop("source") for value in warm["values"])
    assert {**cold, "from_cache": True} == warm


def test_uuid_changes_with_options_and_marks_and_with_nothing_else():
    pipeline = swa_compile.passes.pipeline
    assert pipeline().uuid() == pipeline().uuid()
    assert pipeline().uuid() == pipeline({"dump_dir": "somewhere"}).uuid()
    assert pipeline().uuid() != pipeline({"lower_stores": False}).uuid()
    before = pipeline().uuid()
    with torch.library._scoped_library("uuid_test", "FRAGMENT") as library:
        library.define("translate(Tensor mapping, Tensor loc) -> Tensor")
        swa_compile.mark_translation("uuid_test::translate")
        assert pipeline().uuid() != before
    # An operator that went away with its library is in no graph any more.
    assert pipeline().uuid() == before


def test_strict_raises_with_code_and_line(compiled, make_mapping):
    mapping = make_mapping()
    score = torch.rand(5, 90)

    def forward(mapping, score):
        return translate_loc(mapping, score.argmax(-1)) + 1

    with pytest.raises(Exception, match="LOC_FROM_ACTIVATIONS") as caught:
        compiled(forward, mapping, score, strict=True)

    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
        if len(chain) > 10:
            break
    assert swa_compile.HoistError in chain
    assert "test_pipeline.py" in str(caught.value)


def test_errors_name_inputs_as_the_model_does(compiled, make_mapping):
    def forward(mapping, loc):
        mapping.add_(1)
        return translate_loc(mapping, loc) + 1

    for engine in ("swa_eager", "swa"):
        with pytest.raises(Exception, match=r"MAPPING_WRITTEN.*mapping is written in this forward"):
            compiled(forward, make_mapping(), LOC, engine=engine, strict=True)


def test_strict_passes_where_everything_is_hoisted(compiled, make_mapping):
    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    _, (report,) = compiled(forward, make_mapping(), LOC, strict=True)
    assert report.translations_left == 0


def test_nested_collectors_all_see_the_inner_graph(make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    torch._dynamo.reset()
    with swa_compile.collect() as outer, torch.no_grad():
        with swa_compile.collect() as inner:
            torch.compile(forward, backend="swa_eager")(mapping, LOC)
        with swa_compile.collect() as later:
            torch.compile(forward, backend="swa_eager")(mapping, LOC)  # compiled already
    assert len(outer) == len(inner) == 1 and not later


def cache_hit(report):
    """What Inductor does with the counters when it takes a graph from its cache."""
    key = "swa_compile_report " + json.dumps(report.to_dict(), separators=(",", ":"))
    torch._dynamo.utils.counters["inductor"][key] += 1


def test_inner_blocks_and_compilations_take_no_report_from_the_outer_block(make_mapping):
    """A hit of stock Inductor's cache is only seen when somebody looks; who looks may be inside."""
    hits = [swa_compile.GraphReport(translations_found=n) for n in (3, 4, 5)]
    mapping = make_mapping()

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    cache_hit(hits[0])  # ahead of all blocks: nobody's
    torch._dynamo.reset()
    with swa_compile.collect() as outer:
        cache_hit(hits[1])
        with swa_compile.collect() as inner:
            pass
        cache_hit(hits[2])
        torch.compile(forward, backend="swa_eager")(mapping, LOC)
        cache_hit(hits[1])
    assert not inner
    assert [(r.translations_found, r.from_cache) for r in outer] == [
        (4, True),
        (5, True),
        (1, False),
        (4, True),
    ]


def test_a_graph_that_another_thread_compiled_is_not_taken_for_a_cached_one(make_mapping):
    mapping = make_mapping()
    options = {"post_grad_custom_pre_pass": swa_compile.passes.pipeline()}

    def run():
        graph = torch.fx.symbolic_trace(lambda mapping, loc: translate_loc(mapping, loc)).graph
        for node, value in zip(graph.nodes, (mapping, LOC, mapping[LOC]), strict=False):
            node.meta["val"] = value
        options["post_grad_custom_pre_pass"](graph)

    with swa_compile.collect() as reports:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert [(r.translations_found, r.from_cache) for r in reports] == [(1, False)]


def test_functionalization_version_1_is_refused(compiled, make_mapping, make_caches):
    caches = make_caches(1)

    def forward(mapping, loc, k):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))

    with (
        torch._inductor.config.patch(enable_auto_functionalized_v2=False),
        pytest.raises(Exception, match="version 1"),
    ):
        compiled(forward, make_mapping(), LOC, rows(5))


def test_dumps_hold_every_stage(compiled, make_mapping, tmp_path):
    def forward(mapping, loc):
        return translate_loc(mapping, loc) + translate_loc(mapping, loc)

    _, (report,) = compiled(forward, make_mapping(), LOC, dump_dir=str(tmp_path))

    (folder,) = tmp_path.glob("pid-*/graph-*")
    assert report.dump == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "00-functional.py",
        "01-hoisted.py",
        "02-lowered.py",
        "captured.py",
        "diff-01.txt",
        "diff-02.txt",
        "graph.json",
        "index.html",
        "op-counts.txt",
        "report.json",
    ]
    assert (folder / "00-functional.py").read_text().count("= torch.ops.swa.translate_loc") == 2
    assert (folder / "01-hoisted.py").read_text().count("= torch.ops.swa.translate_many") == 1
    assert "= torch.ops.swa.translate" not in (folder / "02-lowered.py").read_text()
    assert json.loads((folder / "report.json").read_text()) == report.to_dict()


def test_a_dump_that_cannot_be_written_is_a_warning(compiled, make_mapping, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    with pytest.warns(UserWarning, match="no dump"):
        _, (report,) = compiled(forward, make_mapping(), LOC, dump_dir=str(blocked))
    assert report.dump is None and report.translation_nodes == 1


def test_a_graph_that_an_engine_traced_itself_is_hoisted(make_mapping):
    from torch.fx.experimental.proxy_tensor import make_fx

    mapping = make_mapping()

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + translate_loc(mapping, loc[1:]).sum()

    for mode in ("fake", "symbolic"):
        module = make_fx(forward, tracing_mode=mode)(mapping, LOC)
        with swa_compile.collect() as reports:
            swa_compile.passes.pipeline()(module.graph)
        module.recompile()
        assert torch.equal(module(mapping, LOC), forward(mapping, LOC))
        assert (reports[0].translations_found, reports[0].translation_nodes) == (2, 1)
        assert len(reports[0].values) == 1


def test_the_environment_variable_asks_for_dumps(compiled, make_mapping, tmp_path, monkeypatch):
    monkeypatch.setenv("SWA_COMPILE_DUMP", str(tmp_path))

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    _, (report,) = compiled(forward, make_mapping(), LOC)
    assert report.dump is not None and report.dump.startswith(str(tmp_path))
    assert (tmp_path / report.dump / "02-lowered.py").exists()
