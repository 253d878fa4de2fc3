"""On a GPU: the same values as on the CPU, no synchronization, capture, device assertions."""

import subprocess
import sys

import pytest
import torch

from swa_compile import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FULL = 200
PAGE = 4


@pytest.fixture
def no_sync():
    """Any device-to-host synchronization is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def to_gpu(args):
    return [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]


def translation_calls():
    mapping = torch.cat([torch.randint(0, 40, (FULL + PAGE,)), torch.tensor([-1])])
    loc = torch.randint(-1, FULL, (3, 50), dtype=torch.int32)
    yield ops.translate_loc, (mapping, loc.t())
    yield ops.translate_page_table, (mapping, (loc // PAGE).long()[:, ::3], PAGE)
    yield ops.translate_paged_loc, (torch.randint(-1, 9, (30,)), loc, PAGE)


CALLS = list(translation_calls())


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_translation_agrees_with_the_cpu(op, args, request):
    given = to_gpu(args)
    op(*given)  # compiles
    request.getfixturevalue("no_sync")
    got = op(*given)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), op(*args))
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [(None, None), (0.7, 1.3), (0.7, None)])
@pytest.mark.parametrize("rank", [3, 4])
def test_store_agrees_with_the_cpu_on_every_row(dtype, scales, rank, request):
    if dtype.itemsize > 1 and scales != (None, None):
        pytest.skip("scales are for float8")
    row = (2, 6) if rank == 3 else (2, 2, 3)
    stack = torch.randn(4, 50, *row).to(dtype)
    k, v = torch.randn(2, 30, *row).bfloat16() * 300
    loc = torch.randperm(49)[:30] + 1
    loc[3] = loc[7] = -1
    expected = stack.clone()
    ops.store_kv(expected[1], expected[3], k, v, loc, *scales)
    stack, k, v, loc = to_gpu((stack, k, v, loc))
    scales = [None if scale is None else torch.tensor(scale).cuda() for scale in scales]
    ops.store_kv(stack[1], stack[3], k, v, loc, *scales)
    request.getfixturevalue("no_sync")
    ops.store_kv(stack[1], stack[3], k, v, loc, *scales)
    torch.cuda.set_sync_debug_mode("default")
    got = stack.cpu().float()
    assert torch.equal(got[:, 1:], expected.float()[:, 1:])
    assert torch.equal(got[::2], expected.float()[::2])


def test_float_scales_agree_with_the_cpu():
    caches = torch.zeros(2, 5, 2, 64).to(torch.float8_e4m3fn)
    k, v, loc = torch.randn(3, 2, 64), torch.randn(3, 2, 64), torch.tensor([1, 4, 2])
    on_gpu = caches.cuda()
    ops.store_kv(*caches, k, v, loc, 0.3, 0.7)
    ops.store_kv(*on_gpu, *to_gpu((k, v, loc)), 0.3, 0.7)
    assert torch.equal(on_gpu.cpu().float(), caches.float())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_attention_agrees_with_the_cpu(window, dtype, request):
    table = (torch.randperm(20) + 1).view(2, 10).int()
    k_cache, v_cache = (torch.randn(21 * PAGE, 2, 8).to(dtype) for _ in "kv")
    lens, cu = torch.tensor([37, 22]).int(), torch.tensor([0, 6, 7]).int()
    args = (torch.randn(9, 4, 8), k_cache, v_cache, table, lens, cu)
    options = {"page_size": PAGE, "window": window, "softcap": 5.0}
    want = ops.paged_attention(*args, **options, sinks=torch.arange(4.0))
    given, sinks = to_gpu(args), torch.arange(4.0).cuda()
    ops.paged_attention(*given, **options, sinks=sinks)
    request.getfixturevalue("no_sync")
    got = ops.paged_attention(*given, **options, sinks=sinks)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


def test_captured_graph_reads_the_live_inputs_of_each_replay():
    mapping = torch.cat([torch.arange(FULL), torch.tensor([-1])]).cuda()
    loc = torch.tensor([3, 5, -1]).cuda()
    k, v = torch.ones(3, 2, 8).cuda(), torch.ones(3, 2, 8).cuda()
    k_cache, v_cache = torch.zeros(2, FULL, 2, 8).cuda()

    def forward():
        ops.store_kv(k_cache, v_cache, k, v, ops.translate_loc(mapping, loc))
        torch.ops.swa.check_ids(loc, -1, FULL, "loc")
        return torch.ops.swa.translate_many([mapping], [loc], ["swa::translate_loc"], [0])[0]

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for cache in (k_cache, v_cache):
        cache.zero_()
    mapping[:FULL] += 1
    loc.copy_(torch.tensor([10, -1, 20]))
    graph.replay()
    assert out.tolist() == [11, -1, 21]
    for cache in (k_cache, v_cache):
        assert cache[1:].sum(dim=(1, 2)).nonzero().flatten().tolist() == [10, 20]


BAD = {
    "translate_loc": "ops.translate_loc(mapping, ids([1, 9]))",
    "translate_loc below": "ops.translate_loc(mapping, ids([-2]))",
    "translate_page_table": "ops.translate_page_table(mapping, ids([5]), 2)",
    "translate_paged_loc": "ops.translate_paged_loc(mapping, ids([-2]), 2)",
    "check_ids": "torch.ops.swa.check_ids(ids([9]), -1, 9, 'x')",
    "store_kv": "ops.store_kv(cache, cache.clone(), cache[:1], cache[:1], ids([9]))",
    "store_kv below": "ops.store_kv(cache, cache.clone(), cache[:1], cache[:1], ids([-2]))",
    "paged_attention": (
        "ops.paged_attention(cache[:1], cache, cache, ids([[1, 9]]), ids([2]), ids([0, 1]))"
    ),
    "paged_attention below": (
        "ops.paged_attention(cache[:1], cache, cache, ids([[1, -1]]), ids([2]), ids([0, 1]))"
    ),
    "paged_attention length": (
        "ops.paged_attention(cache[:1], cache, cache, ids([[1]]), ids([2]), ids([0, 1]))"
    ),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_bad_id_stops_the_device(call):
    script = f"""
import torch
from swa_compile import ops
ids = lambda values: torch.tensor(values).cuda()
mapping, cache = torch.arange(9).cuda(), torch.zeros(9, 2, 4).cuda()
torch.cuda.synchronize()
{call}
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    # The error surfaces at whichever call comes next, under that call's name.
    assert done.returncode != 0
    assert "device-side assert" in done.stderr or "Assertion `" in done.stderr, done.stderr
