"""Caches of other kinds: one buffer, float8 with scales, bytes, copies around a store."""

import numpy as np
import pytest
import torch

from swa_compile.ops import store_kv, store_latent, translate_loc
from swa_compile.passes.guards import writes_parts_as_wider_dtypes

ROWS = 24
LOC = torch.tensor([90, 41, 77, 30])
ENGINES = ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)]


def slots(mapping):
    """Distinct live rows for LOC, so that the outcome is one."""
    mapping[LOC] = torch.tensor([5, 9, 2, 17])
    return mapping[LOC]


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("middle", [(), (1,)])
def test_one_buffer_caches(engine, middle, compiled, make_mapping):
    mapping = make_mapping()
    rows = slots(mapping)
    caches = [random(ROWS, *middle, 12, seed=i) for i in range(3)]
    want = [cache.clone() for cache in caches]
    latent = random(4, *middle, 12)
    for i, cache in enumerate(want):
        cache[rows] = latent * (i + 1)

    def forward(mapping, loc, latent):
        for i, cache in enumerate(caches):
            store_latent(cache, latent * (i + 1), translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, LOC, latent, engine=engine)

    assert (report.translation_nodes, report.stores_lowered) == (1, 3)
    assert report.cache_copies in (None, 0)
    for got, cache in zip(caches, want, strict=True):
        assert torch.equal(got, cache)


@pytest.mark.parametrize(
    ("engine", "dtype", "scale"),
    [
        *(
            ("swa_eager", dtype, scale)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            for scale in ("none", "tensor", "number")
        ),
        pytest.param("swa", torch.float8_e4m3fn, "tensor", marks=pytest.mark.inductor),
        pytest.param("swa", torch.float8_e4m3fn, "number", marks=pytest.mark.inductor),
    ],
)
def test_float8_caches_divide_and_saturate_as_eager_stores_do(
    engine, dtype, scale, compiled, make_mapping
):
    mapping = make_mapping()
    rows = slots(mapping)
    factor = {"none": None, "tensor": torch.tensor(0.25), "number": 0.25}[scale]
    k = random(4, 2, 4) * 300
    k[0, 0, 0], k[1, 0, 0] = 1e6, -1e6  # beyond the largest finite value
    caches = [(torch.zeros(ROWS, 2, 4).to(dtype), torch.zeros(ROWS, 2, 4).to(dtype)) for _ in "ab"]

    def forward(mapping, loc, k):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k * 2, translate_loc(mapping, loc), factor, factor)

    _, (report,) = compiled(forward, mapping, LOC, k, engine=engine)

    assert report.stores_lowered == 2
    limit = torch.finfo(dtype).max
    for k_cache, v_cache in caches:
        for cache, value in ((k_cache, k), (v_cache, k * 2)):
            scaled = value / (1.0 if factor is None else 0.25)
            want = scaled.clamp(-limit, limit).to(dtype)
            assert torch.equal(cache[rows].view(torch.uint8), want.view(torch.uint8))
            others = [row for row in range(1, ROWS) if row not in rows.tolist()]
            assert not cache[others].view(torch.uint8).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_caches_round_once(engine, compiled, make_mapping):
    mapping = make_mapping()
    rows = slots(mapping)
    cache = tuple(torch.zeros(ROWS, 2, 4, dtype=torch.bfloat16) for _ in "kv")
    k = random(4, 2, 4)

    def forward(mapping, loc, k):
        store_kv(*cache, k * 3, k, translate_loc(mapping, loc))

    compiled(forward, mapping, LOC, k, engine=engine)
    assert torch.equal(cache[0][rows], (k * 3).bfloat16())
    assert torch.equal(cache[1][rows], k.bfloat16())


@pytest.mark.parametrize("engine", ENGINES)
def test_one_byte_pool_written_as_two_dtypes_is_a_named_error(engine, compiled, make_mapping):
    """Float8 values and bfloat16 scales of one row: plain Inductor mixes up their rows."""
    mapping, pool = make_mapping(), torch.zeros(ROWS, 24, dtype=torch.uint8)

    def forward(pool, mapping, loc, values, scales):
        where = translate_loc(mapping, loc)
        store_latent(pool[:, :16].view(torch.float8_e4m3fn), values, where)
        store_latent(pool[:, 16:].view(torch.bfloat16), scales, where)

    words = "'pool' is written through views of dtype torch.bfloat16 and torch.float8_e4m3fn"
    if not writes_parts_as_wider_dtypes():
        words = r"a part of 'pool' \(torch.uint8\) is written as torch.bfloat16"
    with pytest.raises(Exception, match=words):
        compiled(forward, pool, mapping, LOC, random(4, 16), random(4, 4), engine=engine)
    assert not pool.any()


@pytest.mark.parametrize("engine", ENGINES)
def test_one_byte_pool_written_as_one_dtype(engine, compiled, make_mapping):
    mapping = make_mapping()
    rows = slots(mapping)
    pool = torch.zeros(ROWS, 24, dtype=torch.uint8)
    scales = random(4, 4)

    def forward(pool, mapping, loc, scales):
        store_latent(pool[:, 16:].view(torch.bfloat16), scales, translate_loc(mapping, loc))

    if not writes_parts_as_wider_dtypes():  # torch 2.11 and 2.12 write wrong rows
        with pytest.raises(Exception, match=r"a part of 'pool' \(torch.uint8\) is written as"):
            compiled(forward, pool, mapping, LOC, scales, engine=engine)
        assert not pool.any()
        return
    compiled(forward, pool, mapping, LOC, scales, engine=engine)
    want = torch.zeros_like(pool)
    want[rows, 16:] = scales.bfloat16().view(torch.uint8)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_snapshot_taken_ahead_of_an_in_place_move_keeps_the_old_rows(
    engine, compiled, make_mapping
):
    mapping = make_mapping()
    rows = slots(mapping)
    cache, v_cache = random(ROWS, 2, 4), random(ROWS, 2, 4, seed=2)
    old = cache.clone()
    k = random(4, 2, 4, seed=3)

    def forward(cache, mapping, loc, k):
        snapshot = cache.clone()
        store_kv(cache, v_cache, k, k, translate_loc(mapping, loc))
        cache[20:23] = snapshot[1:4]
        return snapshot

    snapshot, _ = compiled(forward, cache, mapping, LOC, k, engine=engine)
    want = old.clone()
    want[rows] = k
    want[20:23] = old[1:4]
    assert torch.equal(snapshot, old) and torch.equal(cache, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_stores_of_all_layers_projected_up_front(engine, compiled, make_mapping, make_caches):
    """An encoder's K and V for every layer come out of one matrix product."""
    mapping = make_mapping()
    rows = slots(mapping)
    caches, before = make_caches(4), make_caches(4)
    x, weight = random(4, 8), random(8, 4 * 16, seed=2)

    def forward(mapping, loc, x):
        projected = (x @ weight).view(4, 4, 2, 2, 4)
        for i, cache in enumerate(caches):
            store_kv(*cache, projected[:, i, 0], projected[:, i, 1], translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, LOC, x, engine=engine)
    assert (report.translation_nodes, report.stores_lowered) == (1, 4)
    projected = (x.double() @ weight.double()).view(4, 4, 2, 2, 4).float()
    for i, (cache, old) in enumerate(zip(caches, before, strict=True)):
        for kv in range(2):
            want = np.asarray(old[kv]).copy()
            want[rows] = projected[:, i, kv]
            assert np.allclose(cache[kv], want, atol=1e-4)
