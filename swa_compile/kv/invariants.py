"""The invariants of a pool, checked against its tensors."""

from __future__ import annotations

from collections import Counter

from swa_compile.kv.pool import HybridKVPool
from swa_compile.kv.slots import PoolCorrupt


def check(pool: HybridKVPool) -> None:
    """Raise where an invariant of `pool` is broken. Reads the device: for tests and debugging.

    No page owned twice or lost; the mapping names, for each live token, the SWA slot of its own
    request, 0 for an evicted one and for every free slot, and -1 at its end; `req_to_token` names
    the full slots.

    Raises:
        PoolCorrupt: naming what does not hold.
    """
    size = pool.page_size
    states = pool._requests
    _own_once(pool._full.pages, pool._full.free_pages(), [s.full_pages for s in states.values()])
    _own_once(pool._swa.pages, pool._swa.free_pages(), [s.swa_pages for s in states.values()])

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


def _own_once(pages: int, free: frozenset[int], owned: list[list[int]]) -> None:
    count = Counter(page for request in owned for page in request)
    count.update(free)
    for page in range(1, pages + 1):
        if count[page] != 1:
            raise PoolCorrupt(f"page {page} has {count[page]} owners")
    if count.total() != pages:
        raise PoolCorrupt("a page is owned that the pool does not have")
