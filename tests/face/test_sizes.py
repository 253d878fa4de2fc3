"""One compilation for every number of tokens and requests."""

import numpy as np
import pytest
import torch

import swa_compile
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.ops import store_kv, translate_loc

SIZES = (8, 2, 1, 0, 64)
ENGINES = ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_batch_size_runs_one_graph_and_writes_its_rows(engine):
    rng = np.random.default_rng(0)
    mapping = torch.from_numpy(np.append(rng.permutation(400) % 99 + 1, -1))
    caches = [(torch.zeros(100, 2, 4), torch.zeros(100, 2, 4)) for _ in range(3)]

    def forward(mapping, loc, k):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k * 2, translate_loc(mapping, loc))
        return k.sum(-1)

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = torch.compile(forward, backend=engine, fullgraph=True)
        for n in SIZES:
            _, first = np.unique(mapping.numpy()[:-1], return_index=True)
            loc = torch.from_numpy(rng.permutation(first)[:n])  # distinct rows
            k = torch.randn(n, 2, 4)
            want = [cache[0].clone() for cache in caches]
            for rows in want:
                rows[mapping[loc]] = k
            swa_compile.mark_sizes(loc, k)
            assert torch.allclose(call(mapping, loc, k), k.sum(-1))
            for (k_cache, _), rows in zip(caches, want, strict=True):
                assert torch.equal(k_cache[1:], rows[1:]), n
    assert len(reports) == 1
    assert (reports[0].translation_nodes, reports[0].stores_lowered) == (1, 3)
    assert not reports[0].cache_copies


def test_every_batch_size_of_the_reference_model_runs_one_graph():
    config = HybridConfig(layers=("swa", "full"), d_model=32, head_dim=8, window=8)
    runs = []
    for compiled in (False, True):
        pool = HybridKVPool(config.layer_specs(), max_tokens=200, max_requests=64)
        torch.manual_seed(0)
        forward = model = HybridTransformer(config, pool).eval()
        torch._dynamo.reset()
        if compiled:
            forward = torch.compile(model, backend="swa_eager", fullgraph=True)
        logits = []
        with torch.no_grad(), swa_compile.collect() as reports:
            for n in SIZES:
                requests = [pool.open() for _ in range(n)]
                pieces = [(request, [request % 7]) for request in requests]
                batch = pool.batch(pieces, width=16)
                swa_compile.mark_sizes(batch)
                logits.append(forward(batch))
                for request in requests:
                    pool.close(request)
        runs.append((logits, len(reports)))
    for want, got in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.allclose(want, got, atol=1e-5)
    assert runs[1][1] == 1


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="got str"):
        swa_compile.mark_sizes("loc")
