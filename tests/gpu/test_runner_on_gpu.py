"""`BucketRunner` on a GPU, over compiled code in every mode and over plain functions."""

import pytest
import torch

import swa_compile
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.ops import store_kv, translate_loc
from swa_compile.runner import BucketRunner

pytestmark = pytest.mark.usefixtures("fresh")

FULL, ROWS = 192, 48


class Store(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(ROWS, 2, 8, device="cuda"))
        self.register_buffer("v_cache", torch.zeros(ROWS, 2, 8, device="cuda"))

    def forward(self, out_cache_loc, k, full_to_swa_index_mapping):
        loc = translate_loc(full_to_swa_index_mapping, out_cache_loc)
        store_kv(self.k_cache, self.v_cache, k + 1, k, loc)
        return k * 2


def make_mapping():
    ids = torch.arange(FULL + 1) % (ROWS - 1) + 1
    ids[0], ids[-1] = 0, -1
    return ids.cuda()


def make(mode):
    model = Store()
    if mode == "plain":
        return model, BucketRunner(model, [1, 2, 8], progress=False)
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": mode})
    return model, BucketRunner(compiled, [1, 2, 8], capture=mode != "off", progress=False)


def call(runner, ids, mapping, seed=0):
    k = torch.randn(len(ids), 2, 8, generator=torch.Generator().manual_seed(seed)).cuda()
    loc = torch.tensor(ids, dtype=torch.int64, device="cuda")
    return k, runner(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)


def store(rows, mapping, ids, k):
    for slot, row in zip(ids, k, strict=True):
        rows[mapping[slot]] = row + 1


@pytest.mark.parametrize("mode", ["plain", "off", "full", "piecewise", "auto"])
def test_every_size_pads_replays_and_leaves_the_other_rows(mode):
    """Rows A7, B01, B15 and B49."""
    model, runner = make(mode)
    mapping = make_mapping()
    model.k_cache.normal_()
    rows = model.k_cache.clone()
    for seed, n in enumerate((8, 5, 2, 1, 0, 8, 5, 20, 3)):
        ids = [60 + (7 * seed + i) % 40 for i in range(n)]
        k, out = call(runner, ids, mapping, seed)
        store(rows, mapping, ids, k)
        assert torch.equal(out, k * 2)
        assert torch.equal(model.k_cache[1:], rows[1:]), n
    assert runner.uncaptured == 1
    assert {use.tokens: use.calls for use in runner.buckets} == {1: 2, 2: 1, 8: 5}
    if mode != "off":
        assert sum(use.graph_bytes for use in runner.buckets) > 0  # B52


def test_capturing_ahead_leaves_every_live_row_bit_identical():
    model, runner = make("auto")
    model.k_cache.normal_()
    model.v_cache.normal_()
    before = model.k_cache.clone(), model.v_cache.clone()
    k, loc = torch.ones(3, 2, 8, device="cuda"), torch.tensor([60, 61, 62], device="cuda")
    runner.capture(out_cache_loc=loc, k=k, full_to_swa_index_mapping=make_mapping())
    assert torch.equal(model.k_cache[1:], before[0][1:])
    assert torch.equal(model.v_cache[1:], before[1][1:])


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_steady_calls_neither_synchronize_nor_record(mode):
    _, runner = make(mode)
    mapping = make_mapping()
    for seed in range(3):
        call(runner, [60, 61, 62], mapping, seed)
    loc, k = torch.tensor([70, 71], device="cuda"), torch.randn(2, 2, 8, device="cuda")
    memory = [use.graph_bytes for use in runner.buckets]
    runner(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            out = runner(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, k * 2)
    assert memory == [use.graph_bytes for use in runner.buckets]


@pytest.mark.parametrize("mode", ["plain", "auto"])
@pytest.mark.parametrize("what", ["mapping", "cache"])
def test_a_replaced_tensor_is_used_at_the_next_call(mode, what):
    """Rows B46 and B51."""
    model, runner = make(mode)
    mapping = make_mapping()
    call(runner, [60, 100], mapping)
    old = model.k_cache.data
    if what == "mapping":
        mapping = mapping.clone()
        mapping[1:-1] = mapping[1:-1].flip(0)
    else:
        model.k_cache.data = torch.zeros_like(model.k_cache)
    before, rows = old.clone(), model.k_cache.clone()
    for seed in (1, 2):
        k, _ = call(runner, [65, 110], mapping, seed)
        store(rows, mapping, [65, 110], k)
        assert torch.equal(model.k_cache[1:], rows[1:])
    if what == "cache":
        assert torch.equal(old, before)


def test_another_stream_is_refused():
    _, runner = make("auto")
    mapping = make_mapping()
    call(runner, [60], mapping)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(CaptureUseError, match="another stream"):
        call(runner, [61], mapping)


@pytest.mark.parametrize("mode", ["off", "auto", "piecewise"])
def test_a_model_decodes_the_same_in_buckets(mode):
    """A pool, prefill past the largest bucket, then decode with requests that come and go."""
    config = HybridConfig(
        layers=("swa", "full") * 2, d_model=32, heads=4, kv_heads=2, head_dim=16, window=8
    )

    def build():
        pool = HybridKVPool(
            config.layer_specs(), max_tokens=400, max_requests=4, max_context=64, device="cuda"
        )
        torch.manual_seed(0)
        return HybridTransformer(config, pool).cuda().eval(), pool

    def decode(forward, pool):
        g, outs = torch.Generator().manual_seed(1), []
        requests = [pool.open() for _ in range(4)]
        with torch.no_grad():
            pieces = {r: torch.randint(0, 50, (12,), generator=g).tolist() for r in requests}
            outs.append(forward(pool.batch(pieces, width=64)))
            for live in (4, 3, 4, 1, 2, 4):
                ids = torch.randint(0, 50, (live, 1), generator=g).tolist()
                pieces = dict(zip(requests[:live], ids, strict=True))
                outs.append(forward(pool.batch(pieces, width=64)))
        return outs

    model, pool = build()
    want = decode(model, pool)
    model, pool = build()
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": mode})
    with swa_compile.collect() as reports:
        got = decode(BucketRunner(compiled, [1, 2, 4], progress=False, capture=mode != "off"), pool)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    assert len(reports) <= 2
    if mode == "auto":
        assert sum(report.captures.full_replays for report in reports) >= 6
