"""The `swa` backend on a GPU: rows, counts in the generated code, kernels per forward, replays."""

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc, translate_page_table

FULL, ROWS, LAYERS = 4096, 512, 8


def inputs(n, seed=0):
    rng = np.random.default_rng(seed)
    mapping = np.append(rng.permutation(FULL) % (ROWS - 1) + 1, -1)
    loc = rng.choice(np.arange(ROWS, FULL), n, replace=False)
    # Two tokens of one batch in one SWA row would make the outcome a race: keep the first.
    _, first = np.unique(mapping[loc], return_index=True)
    loc = np.sort(loc[np.sort(first)])[:n]
    loc = np.append(loc, [-1] * (n - len(loc)))
    k = rng.standard_normal((n, 2, 64)).astype(np.float32)
    return mapping.astype(np.int64), loc.astype(np.int64), k


def on_gpu(*arrays):
    return [torch.from_numpy(array).cuda() for array in arrays]


def caches(dtype=torch.float32):
    return [
        (
            torch.zeros(ROWS, 2, 64, dtype=dtype, device="cuda"),
            torch.zeros(ROWS, 2, 64, dtype=dtype, device="cuda"),
        )
        for _ in range(LAYERS)
    ]


def expected(rows, mapping, loc, k):
    rows = rows.copy()
    for slot, row in zip(loc, k, strict=True):
        rows[0 if slot == -1 else mapping[slot]] = row
    return rows


def forward_over(pools):
    def forward(mapping, loc, k):
        for i, (k_cache, v_cache) in enumerate(pools):
            store_kv(k_cache, v_cache, k * (i + 1), k - i, translate_loc(mapping, loc))

    return forward


@pytest.mark.parametrize("mode", ["eager", "off", "inductor"])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_every_row_of_every_cache_is_right(mode, n):
    pools = caches()
    forward = forward_over(pools)
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = forward
        if mode != "eager":
            call = torch.compile(forward, backend="swa", options={"cudagraphs": mode})
        want = [[np.zeros((ROWS, 2, 64), np.float32) for _ in "kv"] for _ in pools]
        for seed in range(4):  # the later ones replay, where there are graphs
            mapping, loc, k = inputs(n, seed)
            call(*on_gpu(mapping, loc, k))
            for i, layer in enumerate(want):
                layer[0] = expected(layer[0], mapping, loc, k * np.float32(i + 1))
                layer[1] = expected(layer[1], mapping, loc, k - np.float32(i))
    for layer, pool in zip(want, pools, strict=True):
        for rows, cache in zip(layer, pool, strict=True):
            got = cache.cpu().numpy()
            wrong = np.flatnonzero((got[1:] != rows[1:]).any((1, 2))) + 1
            assert not len(wrong), f"rows {wrong[:8]} differ"
    if mode != "eager":
        assert reports[0].translation_nodes == 1
        assert reports[0].cache_copies == 0
        assert reports[0].stores_lowered == LAYERS


def test_the_generated_code_reads_the_mapping_in_one_kernel():
    from torch._inductor.utils import run_and_get_code

    pools = caches()
    torch._dynamo.reset()
    with torch.no_grad():
        _, (code,) = run_and_get_code(
            torch.compile(forward_over(pools), backend="swa"), *on_gpu(*inputs(64))
        )
    (name,) = set(re.findall(rf"assert_size_stride\((arg\d+_1), \({FULL + 1}, \), \(1, \)", code))
    launches = [line for line in code.splitlines() if re.search(rf"\.run\([^)]*\b{name}\b", line)]
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_cache_dtypes_hold_what_eager_code_stores(dtype):
    eager, ours = caches(dtype), caches(dtype)
    scale = torch.tensor(0.5, device="cuda") if dtype is torch.float8_e4m3fn else None

    def forward_on(pools):
        def forward(mapping, loc, k):
            for k_cache, v_cache in pools:
                store_kv(k_cache, v_cache, k * 300, k, translate_loc(mapping, loc), scale, scale)

        return forward

    torch._dynamo.reset()
    args = on_gpu(*inputs(64))
    with torch.no_grad():
        forward_on(eager)(*args)
        torch.compile(forward_on(ours), backend="swa")(*args)
    for want, got in zip(eager, ours, strict=True):
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w[1:].view(torch.uint8), g[1:].view(torch.uint8))


def test_page_tables_are_translated_and_cast_once():
    def forward(mapping, table):
        return [
            translate_page_table(mapping, table, 16).to(torch.int32) + layer for layer in range(6)
        ]

    mapping = torch.cat([torch.arange(FULL).flip(0) // 8, torch.tensor([-1])])
    table = torch.randint(0, FULL // 16, (8, 32), dtype=torch.int32)
    table[3, 5:] = -1
    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        got = torch.compile(forward, backend="swa")(mapping.cuda(), table.cuda())
    for layer, out in enumerate(got):
        want = np.where(table == -1, -1, mapping.numpy()[table.numpy() * 16] // 16) + layer
        assert out.dtype == torch.int32 and np.array_equal(out.cpu(), want)
    assert (reports[0].translations_found, reports[0].translation_nodes) == (6, 1)


def test_steady_state_never_synchronizes():
    pools = caches()
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(forward_over(pools), backend="swa")
        args = on_gpu(*inputs(64))
        for _ in range(3):
            call(*args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(*args)
            forward_over(pools)(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


BAD = """
import sys, torch, swa_compile
from swa_compile.ops import store_kv, translate_loc

k_cache, v_cache = torch.zeros(24, 2, 8, device="cuda"), torch.zeros(24, 2, 8, device="cuda")
mapping = torch.cat([torch.arange(96) % 24, torch.tensor([-1])]).cuda()

def forward(mapping, loc, k):
    loc = loc if sys.argv[3] == "rows" else translate_loc(mapping, loc)
    store_kv(k_cache, v_cache, k * 2, k + 1, loc)

call = forward if sys.argv[1] == "eager" else torch.compile(forward, backend="swa", dynamic=False)
with torch.no_grad():
    call(mapping, torch.tensor([5, int(sys.argv[2])]).cuda(), torch.ones(2, 2, 8).cuda())
    torch.cuda.synchronize()
print("no error")
"""


# Rows of the cache itself are checked by the kernel that stores.
@pytest.mark.parametrize(
    ("engine", "bad", "ids"),
    [(engine, bad, "full ids") for engine in ("eager", "swa") for bad in (97, 10**6, -2)]
    + [("swa", bad, "rows") for bad in (24, -2)],
)
def test_an_id_that_no_pool_has_is_a_device_assert(engine, bad, ids, tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(textwrap.dedent(BAD))
    done = subprocess.run(
        [sys.executable, str(script), engine, str(bad), ids],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "no error" not in done.stdout
    assert "device-side assert" in done.stderr or "assert" in done.stderr.lower()
