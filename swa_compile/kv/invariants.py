"""The invariants of a pool, checked against its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swa_compile.kv.requests import Request
from swa_compile.kv.slots import PoolCorrupt

if TYPE_CHECKING:
    from swa_compile.kv.pool import HybridKVPool


def check(pool: HybridKVPool) -> None:
    """Raise where an invariant of `pool` is broken. Reads the device: for tests and debugging.

    No row or page owned twice or lost, and no SWA page given back that a query can still see; the
    mapping names, for each live token, the SWA slot of its own request, 0 for an evicted one and
    for every free slot, and -1 at its end; `req_to_token` names the full slots.

    Raises:
        PoolCorrupt: naming what does not hold.
    """
    size = pool.page_size
    ledger = pool._ledger
    states = ledger.requests
    if sorted([*ledger.free_rows, *states]) != list(range(pool.max_requests)):
        raise PoolCorrupt("a row of req_to_token is lost, or open and free at once")
    for row, state in states.items():
        _holds_what_it_needs(pool, row, state)
    _own_once(ledger.full.pages, ledger.full.free_pages(), [s.full_pages for s in states.values()])
    _own_once(ledger.swa.pages, ledger.swa.free_pages(), [s.swa_pages for s in states.values()])

    mapping = pool.full_to_swa_index_mapping.tolist()
    expected = [0] * (len(mapping) - 1) + [-1]
    for state in states.values():
        for logical, full in enumerate(state.full_pages):
            if pool.window is None or logical < state.evicted:
                continue
            swa = state.swa_pages[logical - state.evicted]
            expected[full * size : (full + 1) * size] = range(swa * size, (swa + 1) * size)
    wrong = [i for i, (a, b) in enumerate(zip(mapping, expected, strict=True)) if a != b]
    if wrong:
        i = wrong[0]
        raise PoolCorrupt(f"the mapping sends full slot {i} to {mapping[i]}, not {expected[i]}")

    table = pool.req_to_token.tolist()
    for row, slots in enumerate(table):
        owner = states.get(row)
        live = owner.slots(0, owner.length, size) if owner else []
        if slots != live + [0] * (len(slots) - len(live)):
            raise PoolCorrupt(f"req_to_token of row {row} does not name its slots")


def _holds_what_it_needs(pool: HybridKVPool, row: int, state: Request) -> None:
    size = pool.page_size
    pages = -(-state.length // size)
    swa_pages = 0 if pool.window is None else pages - state.evicted
    if (len(state.full_pages), len(state.swa_pages)) != (pages, swa_pages):
        raise PoolCorrupt(
            f"request {row} has {len(state.full_pages)} full and {len(state.swa_pages)} SWA pages "
            f"for {state.length} tokens of which {state.evicted} pages are evicted"
        )
    visible = 0 if pool.window is None else pool.first_seen(state.length)
    if state.evicted * size > visible:
        raise PoolCorrupt(f"request {row} lost position {visible}, which its next query sees")


def _own_once(pages: int, free: Sequence[int], owned: list[list[int]]) -> None:
    count = Counter(page for request in owned for page in request)
    count.update(free)
    for page in range(1, pages + 1):
        if count[page] != 1:
            raise PoolCorrupt(f"page {page} has {count[page]} owners")
    if count.total() != pages:
        raise PoolCorrupt("a page is owned that the pool does not have")
