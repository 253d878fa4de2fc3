"""What is refused, in which words, and that a refusal changes nothing."""

import numpy as np
import pytest
import torch

from swa_compile.kv import HybridKVPool, LayerSpec, OutOfSlots


@pytest.mark.parametrize("name", ["kv_heads", "k_dim", "v_dim", "window"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, "3", True])
def test_number_of_a_spec_is_an_int_of_at_least_1(name, bad):
    arguments = {"kv_heads": 1, "k_dim": 2, "v_dim": 2, "window": 4, name: bad}
    with pytest.raises(
        ValueError, match=rf"LayerSpec\.{name} is an int of at least 1; got {bad!r}"
    ):
        LayerSpec("swa", **arguments)


def test_v_is_as_wide_as_k_where_nothing_is_said():
    assert LayerSpec("full", 2, 6).v_dim == 6
    assert LayerSpec("full", 2, 6, 4).row_bytes(2) == 2 * (6 + 4) * 2


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_requests", "max_context", "swa_tokens", "page_size"]
)
@pytest.mark.parametrize("bad", [0, -4, 1.5, "8", True])
def test_size_of_a_pool_is_an_int_of_at_least_1(make_pool, name, bad):
    with pytest.raises(
        ValueError, match=f"HybridKVPool: {name} is an int of at least 1; got {bad!r}"
    ):
        make_pool(**{name: bad})


def test_full_slots_that_int32_cannot_name_are_refused(make_pool):
    sizes = {"page_size": 2**20, "max_context": 8, "swa_tokens": 1, "device": "meta"}
    make_pool(max_tokens=2**31 - 2**20, **sizes)  # with the sink's page exactly 2^31 slots
    with pytest.raises(ValueError, match="req_to_token is int32 and cannot name the slots of 21"):
        make_pool(max_tokens=2**31 - 2**20 + 1, **sizes)


@pytest.mark.parametrize("layer", [-1, 2])
def test_layer_that_the_pool_lacks_is_an_index_error(make_pool, layer):
    """-1 too: a stage that counts layers of the whole model must not get the last one."""
    for cache in (make_pool().k_cache, make_pool().v_cache):
        with pytest.raises(IndexError, match=f"layer {layer} of a pool of 2 layers"):
            cache(layer)


def test_request_that_is_not_open_is_a_key_error_everywhere(make_pool, unchanged):
    pool = make_pool()
    request, other = pool.open(), pool.open()
    pool.extend(other, 3)
    pool.extend(request, 3)
    pool.close(request)
    with unchanged(pool):
        for unknown in (request, -1, 99):
            for call in (
                lambda r: pool.length(r),
                lambda r: pool.extend(r, 1),
                lambda r: pool.evict(r),
                lambda r: pool.close(r),
                lambda r: pool.page_table([r]),
                lambda r: pool.batch({other: [1], r: [1]}),
            ):
                with pytest.raises(KeyError, match=f"there is no open request {unknown}"):
                    call(unknown)


def test_rows_run_out_and_come_back(make_pool, unchanged):
    pool = make_pool(max_requests=2)
    rows = {pool.open(), pool.open()}
    assert rows == {0, 1}
    with unchanged(pool), pytest.raises(OutOfSlots, match="all 2 request rows are in use"):
        pool.open()
    pool.close(1)
    assert pool.open() == 1


def test_context_and_pools_that_are_full_say_what_was_there(make_pool, unchanged):
    pool = make_pool(max_tokens=32, max_context=20, swa_tokens=24, page_size=4)
    a, b = pool.open(), pool.open()
    pool.extend(a, 18)
    with unchanged(pool):
        with pytest.raises(OutOfSlots, match=f"{a} has 18 tokens and cannot take 3 more: the con"):
            pool.extend(a, 3)
        with pytest.raises(OutOfSlots, match="full pool has 3 of 8 pages of 4 tokens free; 4 were"):
            pool.extend(b, 13)
        with pytest.raises(OutOfSlots, match="SWA pool has 1 of 6 pages of 4 tokens free; 2 were"):
            pool.extend(b, 5)


@pytest.mark.parametrize("page", [1, 16])
def test_second_request_that_does_not_fit_takes_the_first_with_it(make_pool, unchanged, page):
    """Though the first one's eviction and slots would have been possible alone."""
    pool = make_pool(4, max_tokens=10 * page, swa_tokens=8 * page, page_size=page)
    a, b = pool.open(), pool.open()
    pool.batch({a: [1] * 6 * page})
    with unchanged(pool):
        with pytest.raises(OutOfSlots, match="full pool"):
            pool.batch({a: [1] * page, b: [1] * (3 * page + 1)})
        with pytest.raises(ValueError, match="stands twice"):
            pool.batch([(a, [1]), (b, [1]), (a, [1])])
        with pytest.raises(ValueError, match="of width 7 cannot hold 8 pages"):
            pool.batch({b: [1], a: [1] * (page + 1)}, width=7)
    pool.batch({a: [1] * page, b: [1] * 3 * page})


@pytest.mark.parametrize(
    ("ids", "error"), [([1, "x"], TypeError), ([1, 2.0], TypeError), ([1, 2**63], ValueError)]
)
def test_token_ids_that_are_no_int64_change_nothing(make_pool, unchanged, ids, error):
    pool = make_pool(4)
    a, b = pool.open(), pool.open()
    pool.extend(a, 9)  # so that there is something to evict
    with unchanged(pool), pytest.raises(error):
        pool.batch({a: [1], b: ids})


def test_sizes_that_are_no_integers_change_nothing(make_pool, unchanged):
    pool = make_pool()
    request = pool.open()
    pool.extend(request, 9)
    with unchanged(pool):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            pool.extend(request, 2.0)
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            pool.batch({request: [1]}, width=16.0)
        with pytest.raises(ValueError, match=f"{request} cannot be extended by -1 tokens"):
            pool.extend(request, -1)


def test_numpy_integers_count_as_integers(make_pool):
    pool = make_pool()
    request = pool.open()
    pool.extend(request, np.int64(3))
    assert type(pool.length(request)) is int
    assert pool.batch({request: [1]}, width=np.int64(5)).page_table.shape == (1, 5)


def test_bytes_follow_dtype_heads_and_dims():
    layers = [LayerSpec("full", 2, 8), LayerSpec("swa", 1, 4, 6, window=3), LayerSpec("full", 1, 2)]
    sizes = {"max_tokens": 100, "max_requests": 1, "swa_tokens": 10, "page_size": 8}
    pool = HybridKVPool(layers, **sizes, dtype=torch.bfloat16)
    full, swa = 104 + 8, 16 + 8
    assert pool.nbytes() == {"full": full * (2 * 16 + 4) * 2, "swa": swa * 10 * 2}
    assert pool.full_only_nbytes() == full * (2 * 16 + 10 + 4) * 2
    total = sum(b.nbytes for name, b in pool.named_buffers() if "_cache_" in name)
    assert sum(pool.nbytes().values()) == total
