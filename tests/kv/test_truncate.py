"""Requests that go back: rejected drafts of speculative decoding."""

import pytest

from swa_compile.kv import check
from swa_compile.ops import translate_loc


@pytest.mark.parametrize("page", [1, 4])
def test_tokens_taken_back_free_their_slots_and_leave_no_trace(make_pool, page):
    pool = make_pool(8, page_size=page)
    one, other = pool.open(), pool.open()
    pool.batch({one: [1] * 6, other: [1] * 5})
    free, mapping = (pool.full_free, pool.swa_free), pool.full_to_swa_index_mapping.clone()
    table = pool.req_to_token.clone()
    pool.batch({one: [2] * 9, other: [2] * 4})
    pool.truncate({one: 6, other: 5})
    assert (pool.length(one), pool.length(other)) == (6, 5)
    assert (pool.full_free, pool.swa_free) == free
    assert pool.full_to_swa_index_mapping.equal(mapping) and pool.req_to_token.equal(table)
    check(pool)


def test_tokens_after_a_rollback_stand_where_the_rejected_stood(make_pool):
    pool = make_pool(8, page_size=4)
    request = pool.open()
    pool.batch({request: [1] * 6})
    first = pool.batch({request: [2] * 5}).out_cache_loc
    pool.truncate({request: 8})
    batch = pool.batch({request: [3] * 2})
    assert batch.positions.tolist() == [8, 9] and batch.seq_lens.tolist() == [10]
    assert batch.out_cache_loc[0] == first[2]  # the page that was given back, handed out again


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_what_the_next_query_sees_survives_a_rollback_of_a_whole_batch(make_pool, window):
    """`batch` evicts by the length before it, so the same tokens may be sent once more."""
    pool = make_pool(window, swa_tokens=30)
    request = pool.open()
    pool.batch({request: [1] * 12})
    for _ in range(3):
        pool.batch({request: [2] * 7})
        pool.truncate({request: 12})
        check(pool)
    slots = pool.req_to_token[request, 12 - window + 1 : 12].long()
    assert (translate_loc(pool.full_to_swa_index_mapping, slots) > 0).all()


def test_going_back_behind_what_is_evicted_is_refused(make_pool, unchanged):
    pool = make_pool(8)
    one, other = pool.open(), pool.open()
    pool.batch({one: [1] * 20, other: [1] * 3})
    pool.evict(one)
    pool.truncate({one: 20})
    with unchanged(pool), pytest.raises(ValueError, match="see position 12, which is evicted"):
        pool.truncate({other: 1, one: 19})
    with unchanged(pool), pytest.raises(ValueError, match="3 tokens and cannot go back to 4"):
        pool.truncate({one: 20, other: 4})
    with unchanged(pool), pytest.raises(ValueError, match="cannot go back to -1"):
        pool.truncate({other: -1})
    with unchanged(pool), pytest.raises(TypeError):
        pool.truncate({other: 1.0})
    with unchanged(pool), pytest.raises(KeyError, match="no open request 2"):
        pool.truncate({other: 1, 2: 0})


def test_the_default_size_suffices_for_extensions_longer_than_the_window(make_pool):
    pool = make_pool(2, max_requests=3, max_extend=6)
    requests = [pool.open() for _ in range(3)]
    for _ in range(3):
        pool.batch({request: [1] * 6 for request in requests})
    with pytest.raises(ValueError, match="max_extend is an int of at least 1; got 0"):
        make_pool(2, max_extend=0)
