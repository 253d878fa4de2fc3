"""`check` finds each kind of damage."""

import pytest

from swa_compile.kv import PoolCorrupt, check


@pytest.fixture
def pool(make_pool):
    """Two requests of 6 and 3 tokens; a window of 4."""
    pool = make_pool(4)
    for tokens in (6, 3):
        pool.extend(pool.open(), tokens)
    pool.evict(0)
    check(pool)
    return pool


def forget_a_page(pool):
    pool._ledger.full.take(1)


def free_a_page_twice(pool):
    pool._ledger.swa.give(pool._ledger.swa.free_pages()[:1])


def free_a_page_in_use(pool):
    pool._ledger.swa.give(pool._ledger.requests[1].swa_pages[:1])


def free_the_sink(pool):
    pool._ledger.full.give([0])


def give_one_page_to_two(pool):
    pool._ledger.requests[1].full_pages[0] = pool._ledger.requests[0].full_pages[0]


def free_an_open_row(pool):
    pool._ledger.free_rows.append(0)


def lose_a_row(pool):
    pool._ledger.free_rows.pop()


def evict_what_is_visible(pool):
    state = pool._ledger.requests[0]
    pool._ledger.swa.give([state.swa_pages.pop(0)])
    pool._map(state.full_pages[state.evicted : state.evicted + 1], [0])
    state.evicted += 1


def have_tokens_without_pages(pool):
    pool._ledger.requests[1].length += 1


def map_an_evicted_token(pool):
    pool.full_to_swa_index_mapping[pool.req_to_token[0, 0]] = 40


def map_the_sink(pool):
    pool.full_to_swa_index_mapping[0] = 1


def map_a_free_slot(pool):
    pool.full_to_swa_index_mapping[60] = 1


def swap_two_requests(pool):
    a, b = pool.req_to_token[0, 5].item(), pool.req_to_token[1, 0].item()
    pool.full_to_swa_index_mapping[[a, b]] = pool.full_to_swa_index_mapping[[b, a]]


def end_the_mapping_with_0(pool):
    pool.full_to_swa_index_mapping[-1] = 0


def change_a_row(pool):
    pool.req_to_token[1, 0] += 1


def leave_a_closed_row_behind(pool):
    pool.req_to_token[2, 0] = 1


DAMAGE = [
    (forget_a_page, "page 10 has 0 owners"),
    (free_a_page_twice, "has 2 owners"),
    (free_a_page_in_use, "has 2 owners"),
    (free_the_sink, "a page is owned that the pool does not have"),
    (give_one_page_to_two, "page 1 has 2 owners"),
    (free_an_open_row, "a row of req_to_token is lost, or open and free at once"),
    (lose_a_row, "a row of req_to_token is lost, or open and free at once"),
    (evict_what_is_visible, "request 0 lost position 3, which its next query sees"),
    (have_tokens_without_pages, "request 1 has 3 full and 3 SWA pages for 4 tokens"),
    (map_an_evicted_token, "the mapping sends full slot 1 to 40, not 0"),
    (map_the_sink, "the mapping sends full slot 0 to 1, not 0"),
    (map_a_free_slot, "the mapping sends full slot 60 to 1, not 0"),
    (swap_two_requests, "the mapping sends full slot 6 to 7, not 6"),
    (end_the_mapping_with_0, "the mapping sends full slot 65 to 0, not -1"),
    (change_a_row, "req_to_token of row 1 does not name its slots"),
    (leave_a_closed_row_behind, "req_to_token of row 2 does not name its slots"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damage_is_found_and_named(pool, damage, words):
    damage(pool)
    with pytest.raises(PoolCorrupt, match=words):
        check(pool)
