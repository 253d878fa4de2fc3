"""What the passes do not own: other operators, their operands, collectives, reads on the host."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import aot_module_simplified, make_boxed_func

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

from .pools import Pools, values
from .reference import attend, store, translate, translate_pages
from .scenario import Counts, Scenario, arrays_of, scenario

LAYERS = 2


def float8_caches(pools):
    make = [pools.cache(i).round().to(torch.float8_e4m3fn) for i in range(2 * LAYERS)]
    return [tuple(make[2 * i : 2 * i + 2]) for i in range(LAYERS)]


@scenario("B29", over=["tensor", "number"])
def test_every_operand_of_stores_and_attention_is_kept(scales):
    """Scales, sinks, soft cap, window, page size: none of them is the passes' business."""
    page = 4
    pools = Pools(full=40, swa=12, page=page)
    table = pools.pages(2, 3)
    lengths = torch.tensor([9, 6], dtype=torch.int32)
    at = [int(table[b, (n - 1) // page]) * page + (n - 1) % page for b, n in enumerate([9, 6])]
    k_scale, v_scale = (torch.tensor(0.5), torch.tensor(2.0)) if scales == "tensor" else (0.5, 2.0)
    inputs = {
        "mapping": pools.mapping(),
        "loc": torch.tensor(at),
        "table": table,
        "lengths": lengths,
        "starts": torch.arange(3, dtype=torch.int32),
        "q": values(2, 4, 4),
        "k": values(2, 2, 4, seed=3).round(),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": values(4, seed=8),
        "caches": float8_caches(pools),
    }
    options = {"page_size": page, "scale": 0.25, "window": 5, "softcap": 20.0}

    def forward(mapping, loc, table, lengths, starts, q, k, k_scale, v_scale, sinks, caches):
        out = []
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k * 4, translate_loc(mapping, loc), k_scale, v_scale)
            swa = translate_page_table(mapping, table, page).to(torch.int32)
            out.append(
                paged_attention(q, k_cache, v_cache, swa, lengths, starts, sinks=sinks, **options)
            )
        return out

    def reference(mapping, loc, table, lengths, starts, q, k, k_scale, v_scale, sinks, caches):
        swa, out = translate_pages(mapping, table, page), []
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k / k_scale)
            store(v_cache, translate(mapping, loc), k * 4 / v_scale)
            out.append(attend(q, k_cache, v_cache, swa, lengths, starts, sinks=sinks, **options))
        return out

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(2 * LAYERS, 1, 2, stores=(LAYERS, LAYERS)),
        calls_of={"swa.paged_attention.default": LAYERS},
        atol=1e-4,
    )


@scenario("B16")
def test_the_compiled_forward_reads_no_tensor_on_the_host():
    """No `.item()`, no data-dependent shape, no copy to another device; sizes are symbols."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(6),
        "table": pools.pages(6, 1),
        "lengths": torch.ones(6, dtype=torch.int32),
        "starts": torch.arange(7, dtype=torch.int32),
        "k": values(6, 2, 4),
        "caches": pools.caches(LAYERS),
    }
    inputs["table"][:, 0] = inputs["loc"]

    def forward(mapping, loc, table, lengths, starts, k, caches):
        out = []
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
            swa = translate_page_table(mapping, table, 1).to(torch.int32)
            out.append(paged_attention(k, k_cache, v_cache, swa, lengths, starts, window=4))
        return out

    def reference(mapping, loc, table, lengths, starts, k, caches):
        swa, out = translate_pages(mapping, table, 1), []
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)
            out.append(attend(k, k_cache, v_cache, swa, lengths, starts, window=4))
        return out

    def no_reads(graph):
        found = re.findall(
            r"torch\.ops\.(aten\.(?:_local_scalar_dense|item|nonzero|equal)\S*)\(", graph
        )
        found += re.findall(r"\bu\d+\b", graph)  # sizes that only data decide
        assert not found, found
        assert not re.search(r"_to_copy\.default\([^)]*device", graph)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(2 * LAYERS, 1, 2, stores=(LAYERS, LAYERS)),
        check_graph=no_reads,
        dynamic=True,
    )


def last_of(results):
    """Something that takes all results of a node at once."""
    return results[-1]


@pytest.mark.parametrize("where", ["a function", "the output"])
def test_users_of_a_store_that_are_no_getitem_keep_their_rows(where):
    """Row B31: another pass of the engine took the getitems away, or hands on the whole tuple."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))

    seen = []

    def backend(gm, example_inputs):
        def rewrite(module, _):
            graph = module.graph
            out = graph.output_node()
            first = next(n for n in graph.nodes if "auto_functionalized" in str(n.target))
            if where == "a function":
                v_cache = list(first.users)[-1]
                with graph.inserting_after(first):
                    taken = graph.call_function(last_of, (first,))
                v_cache.replace_all_uses_with(taken)
                taken.meta.update(v_cache.meta)
                graph.erase_node(v_cache)
            else:
                out.args = ((*out.args[0], first),)
            swa_compile.passes.pipeline()(graph)
            module.recompile()

            def run(args):
                results = module.forward(*args)
                seen.append(results)
                return results if where == "a function" else results[:-1]

            return make_boxed_func(lambda *args: run(args))

        return aot_module_simplified(gm, example_inputs, fw_compiler=rewrite)

    wanted = arrays_of(inputs)
    for k_cache, v_cache in wanted["caches"]:
        store(k_cache, translate(wanted["mapping"], wanted["loc"]), wanted["k"])
        store(v_cache, translate(wanted["mapping"], wanted["loc"]), -wanted["k"])
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(forward, backend=backend, fullgraph=True)(**inputs)
    assert (reports[0].translation_nodes, reports[0].stores_found) == (1, LAYERS)
    for got, want in zip(arrays_of(inputs)["caches"], wanted["caches"], strict=True):
        assert (got[0][1:] == want[0][1:]).all() and (got[1][1:] == want[1][1:]).all()
    if where == "the output":
        handed_on = arrays_of(seen[0][-1])
        assert (handed_on[-1][1:] == wanted["caches"][0][1][1:]).all()


@pytest.fixture(scope="module")
def group():
    """A gloo group of one process, through memory: no port is opened."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_no_collective_runs_while_a_forward_compiles(engine, group, monkeypatch):
    """Row B57: ranks compile at different times, and one that waits for the others hangs."""
    issued = []
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier",
                 "broadcast_object_list", "gather_object", "all_gather_into_tensor",
                 "monitored_barrier", "scatter_object_list", "reduce_scatter_tensor"):  # fmt: skip

        def record(*args, name=name, **kwargs):
            issued.append(name)
            raise AssertionError(f"{name} during compilation")

        for module in (dist, dist.distributed_c10d):
            monkeypatch.setattr(module, name, record)
    pools = Pools()
    mapping, loc, k, caches = pools.mapping(), pools.live(5), values(5, 2, 4), pools.caches(LAYERS)
    want = arrays_of(caches)
    for k_cache, v_cache in want:
        store(k_cache, translate(mapping.numpy(), loc.numpy()), k.numpy() * 2)
        store(v_cache, translate(mapping.numpy(), loc.numpy()), k.numpy())

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            rows = funcol.all_reduce(k * 2, "sum", group)
            store_kv(k_cache, v_cache, rows, k, translate_loc(mapping, loc))

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(forward, backend=engine, fullgraph=True)(mapping, loc, k, caches)
    assert issued == []
    assert (reports[0].translations_found, reports[0].translation_nodes) == (LAYERS, 1)
    for got, wanted in zip(arrays_of(caches), want, strict=True):
        assert (got[0][1:] == wanted[0][1:]).all() and (got[1][1:] == wanted[1][1:]).all()


def test_dumps_are_complete_without_depyf(monkeypatch, tmp_path):
    """Row B53: it is there to show Dynamo's bytecode, and nothing else needs it."""
    monkeypatch.setitem(sys.modules, "depyf", None)
    pools = Pools()

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + 1

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = torch.compile(forward, backend="swa_eager", options={"dump_dir": str(tmp_path)})
        call(pools.mapping(), pools.live(5))
    (folder,) = tmp_path.glob("pid-*/graph-*")
    assert reports[0].dump == str(folder)
    names = {"00-functional.py", "01-hoisted.py", "02-lowered.py", "op-counts.txt", "report.json"}
    assert names <= {path.name for path in folder.iterdir()}
