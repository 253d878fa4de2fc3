"""Paged attention on a GPU: every kernel that runs here against a gather in float64.

What no query sees is poisoned: rows of the caches with NaN, entries of the page table past a
request's end and left of its window with ids that no cache has.
"""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from swa_compile.ops import FlashInferAttention, attention_kernel, paged_attention
from swa_compile.ops.attention_choice import KERNELS, choose
from swa_compile.ops.attention_reference import Keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Call:
    """`new[b]` queries of a request with `lens[b]` tokens; pages scattered over the caches."""

    def __init__(
        self,
        new,
        lens,
        *,
        page_size=1,
        heads=(32, 8),
        dims=(64, 64),
        dtype=torch.bfloat16,
        cache_dtype=None,
        index=torch.int32,
        window=None,
        softcap=0.0,
        sinks=False,
        behind=0,
        finite=False,
    ):
        torch.manual_seed(0)
        self.new, self.lengths, self.page_size = new, lens, page_size
        self.window, self.softcap = window, softcap
        pages = [-(-length // page_size) for length in lens]
        order = (torch.randperm(sum(pages)) + 1).split(pages)
        rows = (sum(pages) + 1) * page_size
        table = torch.full((len(lens), max(pages) + 3), 2**30, dtype=index)
        live = torch.zeros(rows, dtype=torch.bool)
        for b, (count, length) in enumerate(zip(new, lens, strict=True)):
            low = 0 if window is None else max(0, length - count - window + 1)
            table[b, : pages[b]] = order[b]
            seen = torch.arange(low, length if count else low)
            live[table[b, seen // page_size].long() * page_size + seen % page_size] = True
            table[b, : low // page_size if count else pages[b]] = -1
        tokens = sum(new) + behind

        def normal(*shape):
            return torch.randn(shape, device="cuda").to(dtype)

        self.q = normal(tokens, heads[0], dims[0])
        caches = [normal(rows, heads[1], dim) for dim in dims]
        for cache in caches:
            # Kernels that read whole tiles want numbers everywhere, but may not let them through.
            cache[~live.cuda()] = 30.0 if finite else torch.nan
        self.k_cache, self.v_cache = (c.to(cache_dtype or dtype) for c in caches)
        self.table = table.cuda()
        self.lens = torch.tensor(lens, dtype=index).cuda()
        self.starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=index).cuda()
        self.sinks = torch.randn(heads[0], device="cuda") if sinks else None

    def run(self):
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.table,
            self.lens,
            self.starts,
            page_size=self.page_size,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def oracle(self):
        """float64, one request at a time."""
        q = self.q.double()
        out = q.new_zeros(*q.shape[:2], self.v_cache.shape[2])
        group = q.shape[1] // self.k_cache.shape[1]
        first = 0
        for b, (count, length) in enumerate(zip(self.new, self.lengths, strict=True)):
            part, first = slice(first, first + count), first + count
            if not (count and length):
                continue
            low = 0 if self.window is None else max(0, length - count - self.window + 1)
            key = torch.arange(low, length, device="cuda")
            slot = self.table[b, key // self.page_size].long() * self.page_size
            slot += key % self.page_size
            k, v = (
                c.float()[slot].double().repeat_interleave(group, 1)
                for c in (self.k_cache, self.v_cache)
            )
            scores = torch.einsum("nhd,thd->hnt", q[part], k) * q.shape[2] ** -0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            at = torch.arange(length - count, length, device="cuda")[:, None]
            hidden = key > at
            if self.window is not None:
                hidden |= key <= at - self.window
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1)[..., : len(key)]
            out[part] = torch.einsum("hnt,thd->nhd", weights, v)
        return out


def check(got, call):
    want = call.oracle()
    exact = call.q.dtype is torch.float32
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 2e-2, "atol": 4e-3}
    torch.testing.assert_close(got.double(), want, **tolerance)


def kernel_or_skip(name, call):
    """A context in which `name` computes `call`, planned if it has to be."""
    device = call.q.device
    if (reason := KERNELS[name].missing(device)) is not None:
        pytest.skip(f"{name}: {reason}")
    if name != "flashinfer":
        return attention_kernel(name)
    planned = FlashInferAttention(
        tokens=call.q.shape[0],
        requests=len(call.new),
        pages=max(call.q.shape[0], call.table.numel()),
        device=device,
    )
    planned.plan(call.lens.cpu(), call.starts.cpu())
    return attention_kernel(planned)


DECODE = ([1] * 7, [1, 63, 64, 65, 500, 1024, 3000])
EXTEND = ([1, 70, 300, 5, 128], [1, 70, 1500, 900, 129])
MIXED = ([1, 0, 3, 0, 1, 1], [900, 0, 0, 40, 64, 7])
# No more queries than requests, but not one each.
UNEVEN = ([2, 0, 1, 0, 0, 0, 1], [70, 0, 9, 33, 0, 0, 300])
BATCHES = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "uneven": UNEVEN}
SHAPES = {
    "ref24": {"heads": (32, 8), "dims": (64, 64)},
    "gpt-oss": {"heads": (64, 8), "dims": (64, 64), "sinks": True},
    "gemma-3": {"heads": (32, 16), "dims": (128, 128)},
    "gemma-2": {"heads": (8, 4), "dims": (256, 256), "softcap": 50.0},
    "one head per group, odd dims": {"heads": (6, 6), "dims": (80, 48)},
    "groups of 20": {"heads": (20, 1), "dims": (192, 128)},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 1, 128, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_triton_over_shapes_windows_and_page_sizes(shape, page_size, window, batch):
    call = Call(*batch, page_size=page_size, window=window, behind=2, **shape)
    keys = Keys(
        call.k_cache, call.v_cache, call.table, page_size, window, 1.0, call.softcap, call.sinks
    )
    assert choose(call.q, keys).name == "triton"
    check(call.run(), call)


@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
        (torch.float32, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_triton_over_dtypes(dtype, cache_dtype, index, batch):
    call = Call(*batch, dtype=dtype, cache_dtype=cache_dtype, index=index, page_size=16, window=200)
    check(call.run(), call)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "float8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer(page_size, cache_dtype, sinks, window, batch):
    options = {"page_size": page_size, "cache_dtype": cache_dtype, "sinks": sinks}
    # Within a page it reads what lies left of the window, and weighs it with zero.
    call = Call(*batch, dims=(128, 128), window=window, behind=2, finite=page_size > 1, **options)
    with kernel_or_skip("flashinfer", call):
        check(call.run(), call)
        check(call.run(), call)


@pytest.mark.parametrize("dims", [64, 256])
@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_flashinfer_with_softcap(dims, batch):
    call = Call(*batch, dims=(dims, dims), softcap=20.0, window=256)
    with kernel_or_skip("flashinfer", call):
        check(call.run(), call)


def test_flashinfer_plans_layers_of_several_kinds():
    lens = [300, 20, 700]
    calls = [
        Call([1, 1, 1], lens, window=w, dims=(d, d)) for w, d in ((None, 64), (128, 64), (9, 128))
    ]
    with kernel_or_skip("flashinfer", calls[0]):
        for call in calls * 2:
            check(call.run(), call)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("sinks", [False, True])
def test_varlen(sinks, window, batch):
    call = Call(
        *batch, page_size=256, dims=(128, 128), window=window, sinks=sinks, behind=2, finite=True
    )
    # It looks up a page for every tile, also for one whose keys all lie left of the window.
    call.table.clamp_(0, call.k_cache.shape[0] // 256 - 1)
    with kernel_or_skip("varlen", call):
        check(call.run(), call)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_gathers(name, batch):
    call = Call(*batch, page_size=16, window=128, sinks=True, behind=2, dtype=torch.float32)
    with attention_kernel(name):
        check(call.run(), call)


@pytest.mark.parametrize("page_size", [1, 64])
def test_offsets_past_two_to_the_31(page_size):
    rows = 2**21 + 2**16  # of 1024 elements
    call = Call([1, 40], [130, 300], page_size=page_size, heads=(32, 8), dims=(128, 128))
    call.v_cache = call.k_cache  # one cache of that size is enough
    want = call.oracle()
    big = torch.empty(rows, 8, 128, dtype=torch.bfloat16, device="cuda")
    ahead = (rows - call.k_cache.shape[0]) // page_size * page_size
    assert ahead * 1024 > 2**31
    big[ahead : ahead + call.k_cache.shape[0]] = call.k_cache
    call.k_cache = call.v_cache = big
    call.table[call.table < 2**30] += ahead // page_size
    torch.testing.assert_close(call.run().double(), want, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("name", ["triton", "flashinfer", "varlen", "sdpa", "reference"])
@pytest.mark.parametrize("batch", ["decode", "extend"])
def test_captured_call_reads_the_lengths_and_tables_of_each_replay(name, batch):
    page_size = 256 if name == "varlen" else 16
    # The same sizes with other contents.
    first, second = {
        "decode": (([1] * 4, [900, 1, 64, 512]), ([1] * 4, [33, 900, 16, 700])),
        "extend": (([3, 60, 1, 0], [9, 60, 500, 9]), ([1, 2, 20, 41], [500, 2, 37, 90])),
    }[batch]
    options = {
        "page_size": page_size,
        "dims": (128, 128),
        "window": 200,
        "finite": name != "triton",
    }
    call, other = Call(*first, **options), Call(*second, **options)
    width = max(call.table.shape[1], other.table.shape[1])
    rows = max(call.k_cache.shape[0], other.k_cache.shape[0])

    def grown(tensor, dim, size):
        pad = [0, 0] * (tensor.dim() - 1 - dim) + [0, size - tensor.shape[dim]]
        return torch.nn.functional.pad(tensor, pad)

    for each in (call, other):
        each.table = grown(each.table.clamp_min(0) % (rows // page_size), 1, width)
        each.k_cache, each.v_cache = (grown(c, 0, rows) for c in (each.k_cache, each.v_cache))
    if KERNELS[name].missing(call.q.device) is not None:
        kernel_or_skip(name, call)
    planned = None
    if name == "flashinfer":
        planned = FlashInferAttention(tokens=64, requests=4, pages=4 * width, device="cuda")
        planned.plan(call.lens.cpu(), call.starts.cpu())
    graph = torch.cuda.CUDAGraph()
    with attention_kernel(planned or name):
        call.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = call.run()
    graph.replay()
    check(out, call)
    names = ("q", "k_cache", "v_cache", "table", "lens", "starts")
    for field in names:
        getattr(call, field).copy_(getattr(other, field))
    if planned:
        planned.plan(other.lens.cpu(), other.starts.cpu())
    graph.replay()
    check(out, other)


def test_capture_of_a_layer_without_a_plan_is_refused():
    call, other = Call([1, 1], [30, 9]), Call([1, 1], [30, 9], window=4)
    with kernel_or_skip("flashinfer", call):
        call.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.run()
            with pytest.raises(ValueError, match="has not run before the capture"):
                other.run()


@pytest.mark.parametrize("name", ["triton", "flashinfer", "varlen", "sdpa", "reference"])
@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_no_call_synchronizes(name, batch):
    page_size = 256 if name == "varlen" else 1
    call = Call(*batch, page_size=page_size, dims=(64, 64), window=100, finite=True)
    call.table.clamp_(0, call.k_cache.shape[0] // page_size - 1)
    with kernel_or_skip(name, call):
        call.run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = call.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(got, call)


@pytest.mark.parametrize(
    ("batch", "window", "launches"),
    [(([1] * 64, [200] * 64), 128, 1), (([1], [9000]), None, 2), (([2048], [2048]), None, 1)],
    ids=["decode", "decode with split keys", "extend"],
)
def test_number_of_launches(batch, window, launches):
    call = Call(*batch, window=window)
    call.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == launches, kernels


def test_sizes_of_later_batches_compile_nothing_new():
    from swa_compile.ops import attention_triton

    def compiled():
        caches = attention_triton.attend.device_caches[torch.cuda.current_device()]
        return len(caches[0])

    Call([1] * 8, [50] * 8, window=100).run()
    before = compiled()
    for size in (7, 9, 16, 40):
        Call([1] * size, [60 + size] * size, window=100 + size).run()
    # The splits of small batches are constants of the kernel, so a few may be new.
    assert compiled() - before <= 2


BAD = {
    "past the caches": ("[[1, 999, 2]]", 2),
    "negative": ("[[1, -1, 2]]", 2),
    "length past the table": ("[[1, 2, 3]]", 4),
}


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("table", "length"), BAD.values(), ids=BAD)
def test_key_without_a_slot_stops_the_device(table, length, window):
    script = f"""
import torch
from swa_compile.ops import paged_attention
ids = lambda values: torch.tensor(values).cuda()
q, cache = torch.ones(1, 4, 64).cuda().half(), torch.ones(9, 2, 64).cuda().half()
torch.cuda.synchronize()
paged_attention(q, cache, cache, ids({table}), ids([{length}]), ids([0, 1]), window={window})
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr or "Assertion `" in done.stderr, done.stderr


@pytest.mark.parametrize("asked", [None, "sdpa"])
def test_compiled_code_calls_the_kernel_that_was_asked_for(asked):
    call = Call([1] * 3, [40, 7, 90], window=20)
    torch._dynamo.reset()
    with attention_kernel(asked) if asked else nullcontext():
        check(torch.compile(call.run)(), call)
