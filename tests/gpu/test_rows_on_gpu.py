"""One kernel from projection to stores, one kernel for the prologue: results and launch counts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

FULL, ROWS = 4096, 512
HEADS, KV_HEADS, DIM, MODEL = 8, 2, 64, 256


class Layer(nn.Module):
    """Attention as a model writes it: qk-norm, RoPE, translations and stores in every layer."""

    def __init__(self, norm=True, scale=None):
        super().__init__()
        self.qkv = nn.Linear(MODEL, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, MODEL, bias=False)
        self.q_norm = nn.RMSNorm(DIM, eps=1e-6) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(DIM, eps=1e-6) if norm else nn.Identity()
        self.scale = scale

    def forward(self, x, cos, sin, mapping, loc, table, lens, starts, k_cache, v_cache):
        sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        q, k, v = (t.unflatten(-1, (-1, DIM)) for t in self.qkv(x).split(sizes, -1))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        own = translate_loc(mapping, loc)
        store_kv(k_cache, v_cache, k, v, own, self.scale, self.scale)
        pages = translate_page_table(mapping, table, 1).int()
        out = paged_attention(q, k_cache, v_cache, pages, lens, starts, window=8)
        return x + self.out(out.flatten(1))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class Model(nn.Module):
    def __init__(self, layers, **options):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))
        self.table = nn.Parameter(torch.randn(64, DIM // 2))

    def forward(self, x, positions, pools, *ids):
        angles = torch.cat((self.table, self.table), -1)[positions]
        for layer, pool in zip(self.layers, pools, strict=True):
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), *ids, *pool)
        return x


def case(n, layers, cache_dtype, seed=0):
    rng = np.random.default_rng(seed)
    mapping = np.append(rng.permutation(FULL) % (ROWS - 1) + 1, -1)
    # Ids of a full pool that is larger than the SWA pool; no two tokens share an SWA row.
    pick = {int(mapping[i]): int(i) for i in rng.permutation(np.arange(ROWS, FULL))}
    chosen = rng.permutation(list(pick.values()))[:n]
    table = np.stack([chosen[(np.arange(6) + i) % n] for i in range(n)])
    lens = rng.integers(1, 7, n)
    ids = [mapping, chosen, table.astype(np.int32), lens.astype(np.int32)]
    ids.append(np.arange(n + 1, dtype=np.int32))
    generator = torch.Generator().manual_seed(seed)
    pools = [
        [torch.randn(ROWS, KV_HEADS, DIM, generator=generator).to(cache_dtype).cuda() for _ in "kv"]
        for _ in range(layers)
    ]
    x = torch.randn(n, MODEL, generator=generator).bfloat16().cuda()
    positions = torch.from_numpy(rng.integers(0, 64, n)).cuda()
    return x, positions, pools, *(torch.from_numpy(a).cuda() for a in ids)


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="swa", options={"cudagraphs": "off", **options})


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_fused_rows_leave_every_row_as_eager_code_does(norm, cache_dtype):
    scale = torch.tensor(0.5, device="cuda") if cache_dtype is torch.float8_e4m3fn else None
    torch.manual_seed(0)
    model = Model(2, norm=norm, scale=scale).bfloat16().cuda()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = compiled(model)
        for n in (5, 64):
            want, got = case(n, 2, cache_dtype), case(n, 2, cache_dtype)
            outputs = model(*want), call(*got)
            float8 = cache_dtype is torch.float8_e4m3fn
            # A key that falls to the next float8 moves the softmax.
            torch.testing.assert_close(*outputs, rtol=2e-2, atol=0.15 if float8 else 2e-2)
            for layer, (theirs, ours) in enumerate(zip(want[2], got[2], strict=True)):
                for a, b in zip(theirs, ours, strict=True):
                    a, b = a[1:].float(), b[1:].float()
                    wrong = (a - b).abs() > 2e-2 + (0.13 if float8 else 2e-2) * a.abs()
                    # A layer's input differs by roundings from the second on: now and then by two
                    # steps of a float8.
                    assert wrong.float().mean() <= (1e-4 if float8 and layer else 0), layer
    assert all(report.rows_fused == 2 for report in reports)
    assert all(report.cache_copies == 0 for report in reports)


def launches(call, args):
    call(*args)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call(*args)
        torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type.name == "CUDA"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_launch_computes_the_prologue_whatever_the_depth(dynamic):
    found = {}
    for layers in (1, 4, 12):
        model = Model(layers).bfloat16().cuda()
        torch._dynamo.reset()
        with torch.no_grad(), swa_compile.collect() as reports:
            call = torch.compile(
                model, backend="swa", options={"cudagraphs": "off"}, dynamic=dynamic
            )
            names = launches(call, case(16, layers, torch.bfloat16))
        (report,) = reports
        assert report.mapping_kernels == 1
        ahead = names[: next(i for i, name in enumerate(names) if "triton" not in name)]
        found[layers] = len(ahead)
        rows = [name for name in names if name.startswith("rows")]
        assert len(rows) == layers, names
    assert found == {1: 1, 4: 1, 12: 1}, found


def test_rows_of_any_width_and_number_of_heads():
    """The same program as the reference rule gives, row by row, for many shapes."""
    torch.manual_seed(1)
    for heads, dim in ((1, 64), (3, 80), (8, 128), (5, 576)):
        n = 33
        k, v = (torch.randn(n, heads, dim, device="cuda").bfloat16() for _ in "kv")
        weight = torch.randn(dim, device="cuda").bfloat16()
        loc = torch.randperm(ROWS - 1, device="cuda")[:n] + 1

        def forward(k, v, weight, loc, k_cache, v_cache):
            store_kv(k_cache, v_cache, F.rms_norm(k, (k.shape[-1],), weight, 1e-6), v * 2, loc)

        want = [torch.randn(ROWS, heads, dim, device="cuda") for _ in "kv"]
        got = [cache.clone() for cache in want]
        with torch.no_grad(), swa_compile.collect() as reports:
            forward(k, v, weight, loc, *want)
            compiled(forward)(k, v, weight, loc, *got)
        assert reports[-1].rows_fused == 1
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
            assert (a != b).float().mean() < 0.02


def test_a_layer_compiled_by_itself_is_one_launch():
    """No kernel ahead of it: its ids are checked, and "none" is sent to the sink, as it stores."""
    n, heads, dim = 64, 4, 64
    torch.manual_seed(2)
    x = torch.randn(n, 3 * heads, dim, device="cuda").bfloat16()
    angles = torch.rand(n, dim, device="cuda")
    loc = torch.randperm(ROWS - 1, device="cuda")[:n] + 1
    loc[7] = -1

    def forward(x, angles, loc, k_cache, v_cache):
        q, k, v = x.chunk(3, 1)
        q, k = (t * angles[:, None] for t in (q.float(), k.float()))
        store_kv(k_cache, v_cache, k, v, loc)
        return q

    want = [torch.randn(ROWS, heads, dim, device="cuda").bfloat16() for _ in "kv"]
    got = [cache.clone() for cache in want]
    with torch.no_grad():
        call = compiled(forward)
        names = launches(call, (x, angles, loc, *got))
        q = forward(x, angles, loc, *want)
        torch.testing.assert_close(call(x, angles, loc, *got), q, rtol=1e-2, atol=1e-2)
    for theirs, ours in zip(want, got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert [name.split("_")[0] for name in names] == ["rows"], names
