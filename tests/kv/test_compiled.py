"""A batch as an argument of compiled code: its tensors are inputs, none is a constant."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from swa_compile.kv import ForwardBatch
from swa_compile.ops import store_kv, translate_loc, translate_page_table


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def forward(batch):
    """Reads every field."""
    mapping = batch.full_to_swa_index_mapping
    return (
        batch.input_ids + batch.positions,
        translate_loc(mapping, batch.out_cache_loc),
        translate_page_table(mapping, batch.page_table, 1),
        batch.seq_lens + batch.cu_seqlens_q[1:],
    )


def same(got, want):
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_batch_survives_the_pytree_round_trip(make_pool):
    pool = make_pool()
    batch = pool.batch({pool.open(): [5, 6]})
    leaves, spec = pytree.tree_flatten(batch)
    assert [id(leaf) for leaf in leaves] == [id(value) for value in vars(batch).values()]
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is ForwardBatch and vars(again) == vars(batch)
    nested = pytree.tree_map(lambda t: t.clone(), {"batch": [batch]})["batch"][0]
    assert type(nested) is ForwardBatch
    same(list(vars(nested).values()), list(vars(batch).values()))


def test_each_tensor_is_a_graph_input_and_none_a_constant(make_pool):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    pool = make_pool()
    batch = pool.batch({pool.open(): [5, 6, 7]})
    compiled = torch.compile(forward, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    same(compiled(batch), forward(batch))
    (graph,) = graphs
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    wanted = [(tensor.shape, tensor.dtype) for tensor in vars(batch).values()]
    assert sorted(map(str, [(t.shape, t.dtype) for t in inputs])) == sorted(map(str, wanted))
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]


@pytest.mark.parametrize("page", [1, 16])
def test_every_size_agrees_with_eager(make_pool, page):
    """N = 0 is an idle rank."""
    pool = make_pool(page_size=page, max_tokens=256, swa_tokens=256)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for size in (8, 2, 1, 0, 64):
        request = pool.open()
        pieces = {request: range(size)} if size else {}
        batch = pool.batch(pieces)
        same(compiled(batch), forward(batch))
        same(compiled(batch.pad(64, 4)), forward(batch.pad(64, 4)))
        pool.close(request)


def test_mapping_is_read_live_without_a_second_compile(make_pool):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    pool = make_pool(2)
    request = pool.open()
    for step in range(8):
        batch = pool.batch({request: [step]}, width=8)
        got, want = compiled(batch), forward(batch)
        same(got, want)
        assert got[2].count_nonzero() == min(step + 1, 2), "the rest of the pages are evicted"
    assert counter.frame_count == 1


def test_pool_that_takes_the_place_of_another_is_the_one_that_is_read(make_pool):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    first, second = make_pool(), make_pool()
    second.extend(second.open(), 9)
    batches = [pool.batch({pool.open(): [5, 6]}) for pool in (first, second)]
    got = [compiled(batch) for batch in batches]
    assert [g[1].tolist() for g in got] == [[1, 2], [10, 11]]
    assert counter.frame_count == 1


class Layers(nn.Module):
    """Stores one row per token in each layer of a pool."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, batch):
        rows = batch.input_ids.float().view(-1, 1, 1).expand(-1, 1, 2)
        swa = translate_loc(batch.full_to_swa_index_mapping, batch.out_cache_loc)
        store_kv(self.pool.k_cache(0), self.pool.v_cache(0), rows, -rows, batch.out_cache_loc)
        store_kv(self.pool.k_cache(1), self.pool.v_cache(1), rows, -rows, swa)
        return rows.sum()


def test_requests_that_come_and_go_compile_nothing_anew(make_pool):
    counter = CompileCounterWithBackend("aot_eager")
    pools = [make_pool(4), make_pool(4)]
    models = [Layers(pool) for pool in pools]
    compiled = torch.compile(models[0], backend=counter, fullgraph=True)
    for life in range(3):
        requests = [[pool.open() for _ in range(life + 1)] for pool in pools]
        for token in range(1, 7):
            for model, pool, rows in zip((compiled, models[1]), pools, requests, strict=True):
                pieces = {request: [10 * life + token] for request in rows}
                model(pool.batch(pieces, width=8).pad(4, 4))
        for pool, rows in zip(pools, requests, strict=True):
            for request in rows:
                pool.close(request)
    same(list(pools[0].buffers()), list(pools[1].buffers()))
    assert pools[0].k_cache(1).count_nonzero() > 0
    assert counter.frame_count == 1
