"""Stores: every row of every cache, whatever way the caches lie in memory."""

import numpy as np
import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, store_latent, translate_loc

ROWS, LAYERS = 24, 3
LOC = torch.tensor([90, 41, -1, 77, 30])


def values(n, seed=1):
    return torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(seed))


def separate(i, store):
    return store["k"][i], store["v"][i]


def layouts():
    """name -> (tensors that own the storage, (tensors, layer) -> that layer's K and V)."""

    def new(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(5))

    return {
        "separate": (
            [new(ROWS, 2, 4) for _ in range(2 * LAYERS)],
            lambda own, i: (own[2 * i], own[2 * i + 1]),
        ),
        "stacked": (
            [new(LAYERS, ROWS, 2, 4), new(LAYERS, ROWS, 2, 4)],
            lambda own, i: (own[0][i], own[1][i]),
        ),
        "halves of one allocation": (
            [new(2, ROWS, 2, 4) for _ in range(LAYERS)],
            lambda own, i: (own[i][0], own[i][1]),
        ),
        "interleaved": (
            [new(ROWS, 2, 2, 4) for _ in range(LAYERS)],
            lambda own, i: (own[i][:, 0], own[i][:, 1]),
        ),
        "one allocation for all": (
            [new(LAYERS, 2, ROWS, 2, 4)],
            lambda own, i: (own[0][i, 0], own[0][i, 1]),
        ),
        "rows of a larger tensor": (
            [new(3 * ROWS, 2, 4), new(3 * ROWS, 2, 4)],
            lambda own, i: (own[0][i * ROWS : (i + 1) * ROWS], own[1][i * ROWS : (i + 1) * ROWS]),
        ),
    }


def expected(own, pick, mapping, k, v, oracle):
    """Row by row on clones, through NumPy's own views of the same layout."""
    own = [np.asarray(t).copy() for t in own]
    ids = oracle.translate(mapping, LOC)
    for i in range(LAYERS):
        k_cache, v_cache = pick(own, i)
        for slot, k_row, v_row in zip(ids, k, v, strict=True):
            k_cache[max(slot, 0)] = k_row + i
            v_cache[max(slot, 0)] = v_row - i
    return own


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "opaque"])
@pytest.mark.parametrize("name", layouts())
def test_every_layout_writes_the_rows_of_eager_code(name, lowered, compiled, make_mapping, oracle):
    own, pick = layouts()[name]
    mapping, k, v = make_mapping(), values(5), values(5, 2)
    want = expected(own, pick, mapping, k.numpy(), v.numpy(), oracle)

    def forward(own, mapping, loc, k, v):
        for i in range(LAYERS):
            store_kv(*pick(own, i), k + i, v - i, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, own, mapping, LOC, k, v, lower_stores=lowered)

    assert report.translation_nodes == 1
    assert report.stores_found == LAYERS
    if not lowered:
        assert report.stores_lowered == 0
    for got, rows in zip(own, want, strict=True):
        assert_rows_but_sinks(got, rows)


@pytest.mark.inductor
@pytest.mark.parametrize("name", layouts())
def test_inductor_copies_no_cache_and_writes_the_same_rows(name, compiled, make_mapping, oracle):
    own, pick = layouts()[name]
    mapping, k, v = make_mapping(), values(5), values(5, 2)
    want = expected(own, pick, mapping, k.numpy(), v.numpy(), oracle)

    def forward(own, mapping, loc, k, v):
        for i in range(LAYERS):
            store_kv(*pick(own, i), k + i, v - i, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, own, mapping, LOC, k, v, engine="swa")

    assert report.cache_copies == 0
    assert report.stores_lowered == LAYERS
    for got, rows in zip(own, want, strict=True):
        assert_rows_but_sinks(got, rows)


def assert_rows_but_sinks(got, want):
    """All but the rows that -1 may have gone to: what a sink holds is nobody's business."""
    got = np.asarray(got)
    assert got.shape == want.shape
    differing = np.argwhere(~np.isclose(got, want, atol=1e-6))
    row_dim = got.shape.index(ROWS) if ROWS in got.shape else 0
    assert all(at[row_dim] % ROWS == 0 for at in differing), differing[:5]


def test_two_stores_to_one_cache_keep_their_order(compiled, make_mapping, make_caches, oracle):
    (cache,), (before,) = make_caches(1), make_caches(1)
    mapping, k = make_mapping(), values(5)
    other = torch.tensor([90, 50])

    def forward(mapping, loc, other, k):
        store_kv(*cache, k, k, translate_loc(mapping, loc))
        store_kv(*cache, k[:2] * 2, k[:2] * 2, translate_loc(mapping, other))

    compiled(forward, mapping, LOC, other, k)

    first = oracle.store(before[0], oracle.translate(mapping, LOC), k)
    second = oracle.store(first, oracle.translate(mapping, other), k[:2] * 2)
    oracle.same_rows(cache[0], second)


def test_reads_around_a_store_see_old_then_new_rows(compiled, make_mapping, make_caches):
    (cache,), (before,) = make_caches(1), make_caches(1)
    mapping, k = make_mapping(), values(5)

    def forward(mapping, loc, k):
        slot = translate_loc(mapping, loc)[:1]
        old = cache[0][slot] + 0
        store_kv(*cache, k, k, translate_loc(mapping, loc))
        return old, cache[0][slot] + 0

    (old, new), _ = compiled(forward, mapping, LOC, k)

    assert torch.equal(old[0], before[0][mapping[90]])
    assert torch.equal(new[0], k[0])


def test_strided_k_and_v_of_one_projection(compiled, make_mapping, make_caches, oracle):
    (cache,), (before,) = make_caches(1), make_caches(1)
    mapping = make_mapping()
    qkv = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1))

    def forward(mapping, loc, qkv):
        _, k, v = qkv.split(2, dim=1)
        store_kv(*cache, k, v, translate_loc(mapping, loc))

    compiled(forward, mapping, LOC, qkv)

    ids = oracle.translate(mapping, LOC)
    oracle.same_rows(cache[0], oracle.store(before[0], ids, qkv[:, 2:4]))
    oracle.same_rows(cache[1], oracle.store(before[1], ids, qkv[:, 4:]))


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
@pytest.mark.parametrize(
    "views",
    [
        lambda big: (big[1:][0], big[1:][2]),
        lambda big: (big[2][2:9], big[2][12:20]),
        lambda big: (big[3:].flatten(0, 1)[5:12], big[3:].flatten(0, 1)[30:40]),
    ],
    ids=["layers", "rows of a layer", "rows of a flat pool"],
)
def test_inputs_that_begin_inside_their_storage_get_the_rows_of_eager_code(engine, views, compiled):
    big = torch.randn(6, ROWS, 2, 4, generator=torch.Generator().manual_seed(8))
    want = big.clone()
    loc = torch.tensor([3, 5, 1])
    k = values(3)
    for cache in views(want):
        cache[loc] = k

    def forward(first, second, loc, k):
        store_kv(first, second, k, k, loc)

    compiled(forward, *views(big), loc, k, engine=engine)
    assert torch.equal(big, want)


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_views_of_an_input_that_begins_inside_its_storage(engine, compiled, make_mapping):
    """Two layers, so that the second view is of what the first store left."""
    big = torch.randn(5, ROWS, 2, 4, generator=torch.Generator().manual_seed(8))
    want, mapping, k = big.clone(), make_mapping(), values(5)
    for i in (0, 1, 3):
        rows = mapping[LOC].masked_fill(LOC < 0, 0)
        want[1 + i][rows] = k + i

    def forward(caches, mapping, loc, k):
        for i in (0, 1, 3):
            store_latent(caches[i], k + i, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, big[1:], mapping, LOC, k, engine=engine)
    assert report.stores_lowered == 3
    assert torch.equal(big[:, 1:], want[:, 1:])


@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "opaque"])
def test_row_ranges_of_such_an_input_are_right_or_refused(lowered, compiled, make_mapping):
    """torch regenerates the slice at a shifted place, with any operator that writes one."""
    big = torch.randn(3 * ROWS + 1, 2, 4, generator=torch.Generator().manual_seed(8))
    want, mapping, k = big.clone(), make_mapping(), values(5)
    rows = mapping[LOC].masked_fill(LOC < 0, 0)
    want[1:][ROWS : 2 * ROWS][rows] = k

    def forward(cache, mapping, loc, k):
        store_latent(cache[ROWS : 2 * ROWS], k, translate_loc(mapping, loc))

    if lowered:
        compiled(forward, big[1:], mapping, LOC, k)
        sink = 1 + ROWS
        keep = [row for row in range(len(big)) if row != sink]
        assert torch.equal(big[keep], want[keep])
    else:
        with pytest.raises(Exception, match="shifted rows"):
            compiled(forward, big[1:], mapping, LOC, k, lower_stores=False)


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("lowered", [True, False], ids=["lowered", "opaque"])
def test_selections_with_symbolic_sizes_are_right_or_refused(engine, lowered, compiled):
    """Inductor with symbolic sizes writes an opaque store outside such an input."""
    big = torch.randn(4, 2, ROWS, 2, 4, generator=torch.Generator().manual_seed(8))
    want, loc, k = big.clone(), torch.tensor([3, 7, 5]), values(3)
    want[2, 1][loc], want[2, 0][loc] = k, k + 1

    def forward(caches, loc, k):
        store_kv(caches[1, 1], caches[1, 0], k, k + 1, loc)

    options = {"engine": engine, "dynamic": True, "lower_stores": lowered}
    if lowered:
        _, (report,) = compiled(forward, big[1:], loc, k, **options)
        assert report.stores_lowered == 1
        assert torch.equal(big, want)
    else:
        before = big.clone()
        with pytest.raises(Exception, match="shifted rows"):
            compiled(forward, big[1:], loc, k, **options)
        assert torch.equal(big, before)


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
@pytest.mark.parametrize(
    ("shape", "pick"),
    [
        ((3, 2, ROWS, 2, 4), lambda pool, i: (pool[i, 0], pool[i, 1])),
        ((2, 3, ROWS, 2, 4), lambda pool, i: (pool[1, i], pool[0, i])),
        ((ROWS, 3, 2, 2, 4), lambda pool, i: (pool[:, i, 1], pool[:, i, 0])),
    ],
    ids=["layers", "K and V", "interleaved"],
)
def test_opaque_stores_into_parts_of_a_pool_that_changes_its_size(engine, shape, pick, compiled):
    """Inductor reads 0 off a view that it has not laid out, and would write the first layer."""
    rows_at = shape.index(ROWS)
    loc, k = torch.tensor([3, 7, 5]), values(3)

    def forward(pool, loc, k):
        for i in range(3):
            store_kv(*pick(pool, i), k + i, k - i, loc)

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = torch.compile(
            forward, backend=engine, fullgraph=True, options={"lower_stores": False}
        )
        for rows in (ROWS, ROWS + 8, ROWS - 4):
            pool = torch.randn(*shape[:rows_at], rows, *shape[rows_at + 1 :])
            want = pool.clone()
            for i in range(3):
                k_cache, v_cache = pick(want, i)
                for at, slot in enumerate(loc.tolist()):
                    k_cache[slot], v_cache[slot] = k[at] + i, k[at] - i
            call(pool, loc, k)
            assert torch.equal(pool, want), f"{rows} rows"
    assert len(reports) == 2, "the second size makes the sizes symbolic"
    assert [report.stores_lowered for report in reports] == [0, 0]


def test_an_opaque_store_at_a_place_that_no_input_size_gives_is_refused(compiled):
    """The place is read off data, so it cannot be had ahead of the view."""
    pool, k = torch.zeros(4 * ROWS, 2, 4), values(3)

    def forward(pool, start, loc, k):
        first = start.item()
        torch._check(first >= 0)
        torch._check(first + ROWS <= pool.shape[0])
        view = pool.narrow(0, first, ROWS).flatten(1)
        store_latent(view[:, :4], k[:, 0], loc)

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(Exception, match="sizes that no input has"),
    ):
        compiled(forward, pool, torch.tensor(5), torch.tensor([1, 2, 3]), k, lower_stores=False)
    assert not pool.any()


@pytest.mark.inductor
def test_a_buffer_of_a_caches_size_is_no_copy_and_a_snapshot_is_one(compiled):
    """Told apart by what the kernel that writes the buffer reads."""
    cache, x = torch.zeros(ROWS, 2, 4), torch.randn(ROWS, 8)
    k, loc = values(3), torch.tensor([3, 7, 5])

    def forward(cache, x, k, loc):
        hidden = (x @ x.t() @ x).relu()  # [ROWS, 8], as large as the cache
        store_latent(cache, k, loc)
        return hidden @ x.t()

    def snapshot(cache, x, k, loc):
        old = cache + 0
        return forward(cache, x, k, loc), old

    _, (report,) = compiled(forward, cache, x, k, loc, engine="swa", strict=True)
    assert report.cache_copies == 0
    (_, old), (report,) = compiled(snapshot, cache, x, k, loc, engine="swa")
    assert report.cache_copies == 1
    assert torch.equal(old[loc], k)
    with pytest.raises(Exception, match="CACHE_COPIED"):
        compiled(snapshot, cache, x, k, loc, engine="swa", strict=True)
