"""What leaves the SWA pool, and when: exact to the token at page size 1, else to the page."""

import pytest

from swa_compile.kv import OutOfSlots, check
from swa_compile.ops import translate_loc, translate_page_table


def mapped(pool, request):
    """Positions of `request` that have SWA slots."""
    slots = pool.req_to_token[request][: pool.length(request)].long()
    return translate_loc(pool.full_to_swa_index_mapping, slots).nonzero().flatten().tolist()


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("position", [0, 3])
def test_token_is_read_by_a_query_at_the_end_of_its_window_and_gone_right_after(
    make_pool, window, position
):
    pool = make_pool(window)
    request = pool.open()
    pool.batch({request: [1] * (position + 1)})
    slot = pool.req_to_token[request, position]
    while pool.length(request) < position + window:
        batch = pool.batch({request: [1]})  # the last of these queries is at position + window - 1
        assert translate_loc(batch.full_to_swa_index_mapping, slot) > 0
    batch = pool.batch({request: [1]})
    assert batch.positions.tolist() == [position + window]
    assert translate_loc(batch.full_to_swa_index_mapping, slot) == 0


@pytest.mark.parametrize("page", [1, 16])
def test_every_query_of_a_chunk_finds_its_whole_window(make_pool, page):
    """Also the first one, whose window begins before the chunk."""
    pool = make_pool(8, page_size=page, max_tokens=128)
    request = pool.open()
    for count in (5, 11, 1, 23, 2):
        start = pool.length(request)
        batch = pool.batch({request: [1] * count})
        first = max(0, start - 7) // page * page
        assert mapped(pool, request) == list(range(first, start + count))
        pages = translate_page_table(batch.full_to_swa_index_mapping, batch.page_table, page)[0]
        assert all(pages[p // page] > 0 for p in range(first, start + count))


@pytest.mark.parametrize(
    ("page", "length", "left"),
    [(1, 7, 0), (1, 8, 1), (1, 20, 13), (16, 22, 0), (16, 23, 16), (16, 38, 16), (16, 39, 32)],
)
def test_eviction_says_how_many_tokens_it_freed(make_pool, page, length, left):
    """With a window of 8, a query at position 23 is the first that sees nothing of page 0."""
    pool = make_pool(8, page_size=page)
    request = pool.open()
    pool.extend(request, length)
    free = pool.swa_free
    assert pool.evict(request) == left
    assert pool.swa_free == free + left
    assert mapped(pool, request) == list(range(left, length))
    assert pool.evict(request) == 0


def test_extension_alone_evicts_nothing(make_pool, unchanged):
    pool = make_pool(8, swa_tokens=20)
    request = pool.open()
    pool.extend(request, 20)
    assert mapped(pool, request) == list(range(20))
    with unchanged(pool), pytest.raises(OutOfSlots, match="SWA pool has 0 of 20 pages of 1 tok"):
        pool.extend(request, 1)
    pool.batch({request: [1]})
    assert mapped(pool, request) == list(range(13, 21))


def test_batch_evicts_only_the_requests_in_it(make_pool):
    pool = make_pool(4)
    a, b = pool.open(), pool.open()
    pool.extend(a, 10)
    pool.extend(b, 10)
    pool.batch({a: []})
    assert mapped(pool, a) == [7, 8, 9]
    assert mapped(pool, b) == list(range(10))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_prompt_longer_than_the_swa_pool_goes_in_by_chunks(make_pool, page):
    pool = make_pool(8, page_size=page, max_tokens=30 * page, swa_tokens=3 * page + 8)
    request = pool.open()
    while pool.full_free:
        pool.batch({request: [1] * min(2 * page, pool.full_free)})
        check(pool)
    assert pool.length(request) == 30 * page > 2 * pool.swa_tokens


def test_chunk_that_the_swa_pool_cannot_hold_is_refused(make_pool, unchanged):
    pool = make_pool(8, swa_tokens=20)
    request = pool.open()
    pool.batch({request: [1] * 12})
    with unchanged(pool), pytest.raises(OutOfSlots, match=r"SWA pool has 13 of 20 .*; 14 were w"):
        pool.batch({request: [1] * 14})
    pool.batch({request: [1] * 13})


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 9, 16])
def test_bound_holds_for_every_length_and_is_at_most_a_page_too_high(make_pool, page, window):
    pool = make_pool(window, page_size=page, max_tokens=128, swa_tokens=128)
    for extend in (0, 1, 5, 33):
        most = 0
        for length in range(3 * page + window):
            request = pool.open()
            pool.extend(request, length)
            pool.batch({request: [1] * extend})
            most = max(most, (pool.swa_tokens - pool.swa_free) // page)
            pool.close(request)
        assert most <= pool.swa_pages_bound(extend) <= most + 1


def test_default_swa_pool_suffices_for_windows_at_a_time(make_pool):
    """Its promise: all requests, each extended by a window of tokens at a time."""
    pool = make_pool(8, page_size=4, max_tokens=3 * 96, max_context=96)
    assert pool.swa_tokens < pool.full_tokens
    requests = [pool.open() for _ in range(3)]
    for _ in range(12):
        pool.batch({request: [1] * 8 for request in requests})
    assert pool.full_free == 0


def test_pool_without_sliding_layers_maps_nothing(make_pool):
    pool = make_pool(None)
    request = pool.open()
    batch = pool.batch({request: [1, 2, 3]})
    assert batch.full_to_swa_index_mapping.tolist() == [0] * 65 + [-1]
    assert (pool.window, pool.swa_tokens, pool.swa_free, pool.swa_pages_bound(9)) == (None, 0, 0, 0)
    assert pool.evict(request) == 0
    check(pool)
