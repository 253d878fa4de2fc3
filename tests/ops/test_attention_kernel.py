"""The Triton attention kernel, on a GPU or through the interpreter, against a loop in NumPy.

Whatever no query may read is poisoned: rows of the caches with NaN, entries of the page table past
a request's end with pages that no cache has.
"""

import numpy as np
import pytest
import torch

from swa_compile.ops.attention_reference import Keys
from swa_compile.ops.attention_tuning import Device, Tuning, tuning_for

attention_launch = pytest.importorskip(
    "swa_compile.ops.attention_launch", reason="needs Triton", exc_type=ImportError
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def attention(kernels, monkeypatch):
    """attention(call, tuning=..., **options): the kernel on a `Call`."""
    monkeypatch.setattr(attention_launch, "attention_triton", kernels("attention_triton"))

    def run(call, tuning=None, **options):
        dim = call.q.shape[2]
        keys = Keys(
            call.k_cache.to(DEVICE),
            call.v_cache.to(DEVICE),
            call.table.to(DEVICE),
            call.page_size,
            options.get("window"),
            options.get("scale", dim**-0.5),
            options.get("softcap", 0.0),
            None if (sinks := options.get("sinks")) is None else sinks.to(DEVICE),
        )
        assert attention_launch.refusal(call.q, keys) is None
        moved = [t.to(DEVICE) for t in (call.q, call.lens, call.starts)]
        shape = (*call.q.shape[:2], call.v_cache.shape[2])
        out = torch.full(shape, torch.nan, dtype=call.q.dtype, device=DEVICE)
        attention_launch.attention(moved[0], keys, *moved[1:], out, tuning)
        return out.cpu()

    return run


def tuning(rows=16, keys=64, splits=1):
    return Tuning(rows=rows, keys=keys, warps=4, depth=1, splits=splits)


class Call:
    """One call: `new[b]` queries of a request with `lens[b]` tokens, pages scattered at random."""

    def __init__(
        self,
        new,
        lens,
        *,
        page_size=1,
        heads=(4, 2),
        dims=(8, 8),
        dtype=torch.float32,
        cache_dtype=None,
        index=torch.int32,
        behind=0,
    ):
        rng = np.random.default_rng(3)
        pages = [-(-length // page_size) for length in lens]
        total = sum(pages) + 3
        order = iter(rng.permutation(np.arange(1, total)))
        self.page_size = page_size
        self.table = torch.full((len(lens), max(pages, default=0) + 2), 10**6, dtype=index)
        live = np.zeros(total * page_size, bool)
        for b, count in enumerate(pages):
            for p in range(count):
                page = int(next(order))
                self.table[b, p] = page
                used = min(page_size, lens[b] - p * page_size)
                live[page * page_size :][:used] = True

        def normal(*shape):
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)

        self.q = normal(sum(new) + behind, heads[0], dims[0])
        self.k_cache = normal(len(live), heads[1], dims[0])
        self.v_cache = normal(len(live), heads[1], dims[1])
        self.k_cache[torch.from_numpy(~live)] = torch.nan
        self.v_cache[torch.from_numpy(~live)] = torch.nan
        if cache_dtype is not None:
            self.k_cache, self.v_cache = (c.to(cache_dtype) for c in (self.k_cache, self.v_cache))
        self.lens = torch.tensor(lens, dtype=index)
        self.starts = torch.tensor([0, *np.cumsum(new)], dtype=index)

    def oracle(self, *, window=None, scale=None, softcap=0.0, sinks=None):
        """float64, one query and one head at a time."""
        q, k, v = (t.double().numpy() for t in (self.q, self.k_cache, self.v_cache))
        scale = q.shape[2] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        out = np.zeros((*q.shape[:2], v.shape[2]))
        for b, length in enumerate(self.lens.tolist()):
            first, end = self.starts[b : b + 2].tolist()
            for n in range(first, end if length else first):
                at = length - end + n
                seen = np.arange(0 if window is None else max(0, at - window + 1), at + 1)
                page = self.table[b].numpy()[seen // self.page_size].astype(np.int64)
                slots = page * self.page_size + seen % self.page_size
                for h in range(q.shape[1]):
                    scores = k[slots, h // group] @ q[n, h] * scale
                    if softcap:
                        scores = softcap * np.tanh(scores / softcap)
                    weights = np.exp(scores)
                    total = weights.sum() + (0 if sinks is None else np.exp(sinks[h].item()))
                    out[n, h] = weights @ v[slots, h // group] / total
        return torch.from_numpy(out).float()


ALL = {"window": 30, "scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}


@pytest.mark.parametrize(("splits", "rows"), [(1, 16), (1, 64), (3, 16)])
@pytest.mark.parametrize("options", [{}, ALL], ids=str)
@pytest.mark.parametrize(
    ("new", "lens"),
    [
        ([1, 1, 1], [70, 1, 33]),
        ([5, 1, 12], [5, 40, 71]),
        ([1, 0, 2, 0, 3], [64, 0, 0, 7, 3]),
        ([2, 0, 1, 0, 0, 0], [40, 0, 9, 33, 0, 0]),
    ],
    ids=["decode", "extend", "empty and padded requests", "uneven"],
)
def test_batches_of_every_form(attention, new, lens, options, splits, rows):
    call = Call(new, lens, page_size=4, behind=2)
    got = attention(call, tuning(splits=splits, rows=rows), **options)
    torch.testing.assert_close(got, call.oracle(**options), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_page_sizes_and_index_dtypes(attention, page_size, index):
    call = Call([1, 3], [100, 67], page_size=page_size, index=index)
    got = attention(call, tuning(splits=2), window=40)
    torch.testing.assert_close(got, call.oracle(window=40), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((6, 2), (24, 16)), ((1, 1), (80, 5)), ((20, 1), (16, 16)), ((4, 4), (8, 40))],
    ids=["groups of 3", "one head", "groups of 20", "D_v larger than D"],
)
def test_head_counts_and_dims(attention, heads, dims):
    call = Call([1, 2], [9, 70], heads=heads, dims=dims)
    got = attention(call, tuning(rows=32, splits=2))
    torch.testing.assert_close(got, call.oracle(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
def test_caches_of_any_strides_and_queries_that_are_a_part(attention, layout):
    call = Call([1, 4], [70, 9], page_size=16)
    want = call.oracle()
    if layout == "stacked":
        caches = torch.stack([call.k_cache, call.v_cache])
        call.k_cache, call.v_cache = caches[0], caches[1]
    else:
        caches = torch.stack([call.k_cache, call.v_cache], 1)
        call.k_cache, call.v_cache = caches[:, 0], caches[:, 1]
    call.q = torch.cat([call.q, call.q], 1)[:, :4]
    torch.testing.assert_close(attention(call), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                DEVICE == "cpu", reason="Triton's interpreter multiplies bfloat16 as integers"
            ),
        ),
    ],
)
def test_half_precision_agrees_to_its_own_precision(attention, dtype):
    call = Call([1, 4], [130, 70], dims=(16, 16), dtype=dtype)
    got = attention(call, tuning(splits=2), window=50)
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), call.oracle(window=50), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches_are_read_as_they_are(attention, dtype):
    """A scale of K goes into `scale`, one of V onto the result."""
    call = Call([1, 2], [70, 9], dims=(16, 16), cache_dtype=dtype)
    got = attention(call, scale=0.25 * 0.5) * 0.5
    torch.testing.assert_close(got, call.oracle(scale=0.125) * 0.5, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("new", "lens"), [([1, 1], [130, 70]), ([9, 40], [130, 170])])
def test_keys_left_of_the_window_are_never_read(attention, new, lens, page_size):
    call = Call(new, lens, page_size=page_size)
    want = call.oracle(window=20)
    for b, (count, length) in enumerate(zip(new, lens, strict=True)):
        low = max(0, length - count - 20 + 1)
        for t in range(low):
            slot = int(call.table[b, t // page_size]) * page_size + t % page_size
            call.k_cache[slot], call.v_cache[slot] = torch.nan, torch.nan
        call.table[b, : low // page_size] = -1
    got = attention(call, window=20)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_lengths_may_be_a_part_of_another_tensor(attention):
    call = Call([1, 2], [9, 70], heads=(4, 2))
    want = call.oracle()
    call.lens = torch.stack([call.lens, call.lens + 7], 1)[:, 0]
    call.starts = torch.stack([call.starts, call.starts + 5], 1)[:, 0]
    torch.testing.assert_close(attention(call), want, atol=2e-5, rtol=1e-4)


H200 = Device(132, 227 * 1024)


def sizes(tokens, requests, *, group=4, dims=(64, 64), window=None, capacity=8192, device=H200):
    return tuning_for(tokens, requests, 8, group, dims, 2, 1, capacity, window, device)


@pytest.mark.parametrize("requests", [1, 16, 64, 256])
def test_decode_in_a_short_window_is_one_launch(requests):
    assert sizes(requests, requests, window=128).splits == 1


def test_few_requests_of_long_contexts_fill_the_card():
    few, many = sizes(1, 1, capacity=32768), sizes(256, 256, capacity=32768)
    assert 8 * few.splits >= H200.multiprocessors
    assert many.splits == 1
    assert sizes(1, 1, capacity=1).splits == 1


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (256, 256), (192, 512)])
@pytest.mark.parametrize("memory", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (64, 64), (4096, 1), (4096, 8)])
@pytest.mark.parametrize("group", [1, 4, 20, 128])
def test_tiles_fit_the_shared_memory(dims, memory, tokens, requests, group):
    device = Device(100, memory)
    got = sizes(tokens, requests, dims=dims, group=group, device=device)
    for size in (got.rows, got.keys):
        assert size >= 16 and size & (size - 1) == 0
    assert got.rows >= group
    width = 2 * sum(max(16, 1 << (dim - 1).bit_length()) for dim in dims)
    assert got.keys == 16 or got.depth * got.keys * width + got.rows * width <= memory


def test_no_queries_are_no_result(attention):
    assert attention(Call([], [])).shape == (0, 4, 8)
