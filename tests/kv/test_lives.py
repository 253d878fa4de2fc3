"""Long random lives of requests against a model of the pool in plain Python and NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swa_compile.kv import HybridKVPool, LayerSpec, OutOfSlots, check

FULL = LayerSpec("full", 1, 2)
KINDS = {
    "mixed": [FULL, LayerSpec("swa", 1, 2, window=7), LayerSpec("swa", 2, 3, 1, window=20)],
    "wide window first": [LayerSpec("swa", 1, 2, window=33), LayerSpec("swa", 1, 2, window=1)],
    "all sliding, window 1": [LayerSpec("swa", 1, 2, window=1)],
    "all full": [FULL, LayerSpec("full", 2, 1)],
}
REQUESTS = 4


class Book:
    """What the pool has to hold, kept apart from it.

    Attributes:
        full: request -> full slot of each position.
        swa: request -> SWA slot of each position, as it was first seen in the mapping.
        gone: request -> leading positions whose SWA slots were given back.
    """

    def __init__(self, page, window, full_pages, swa_pages, context):
        self.page, self.window, self.context = page, window, context
        self.full_pages, self.swa_pages = full_pages, swa_pages
        self.full, self.swa, self.gone = {}, {}, {}

    def length(self, request):
        return len(self.full[request])

    def pages(self, request, more=0):
        return -(-(self.length(request) + more) // self.page)

    def first_visible(self, request):
        """The first position that a query at the next position sees."""
        return 0 if self.window is None else max(0, self.length(request) - self.window + 1)

    def evicted_to(self, request):
        """Leading positions that an eviction leaves without SWA slots: whole pages."""
        return max(self.gone[request], self.first_visible(request) // self.page * self.page)

    def free_pages(self):
        full = self.full_pages - sum(self.pages(request) for request in self.full)
        held = sum(self.pages(r) - self.gone[r] // self.page for r in self.full)
        return full, self.swa_pages - held

    def fits(self, counts, evict):
        wanted = sum(self.pages(r, n) - self.pages(r) for r, n in counts.items())
        full, swa = self.free_pages()
        if evict:
            swa += sum(self.evicted_to(r) - self.gone[r] for r in counts) // self.page
        return (
            all(self.length(r) + n <= self.context for r, n in counts.items())
            and wanted <= full
            and (self.window is None or wanted <= swa)
        )

    def evict(self, request):
        before, self.gone[request] = self.gone[request], self.evicted_to(request)
        return self.gone[request] - before

    def mapping(self):
        """The whole mapping: each owned page goes to its SWA page, slot by slot."""
        expected = np.zeros((self.full_pages + 1) * self.page + 1, dtype=np.int64)
        expected[-1] = -1
        if self.window is not None:
            for request, slots in self.full.items():
                for position in range(self.gone[request], len(slots), self.page):
                    first, to = slots[position], self.swa[request][position]
                    expected[first : first + self.page] = np.arange(to, to + self.page)
        return expected


class Lives(RuleBasedStateMachine):
    @initialize(
        kinds=st.sampled_from(sorted(KINDS)),
        page=st.sampled_from([1, 4, 16, 64]),
        tight=st.booleans(),
        short=st.sampled_from([False, False, True]),
        requests=st.integers(1, REQUESTS),
    )
    def make(self, kinds, page, tight, short, requests):
        """A pool with some requests, in which SWA slots, full slots or the context run out."""
        self.page = page
        full_pages, swa_pages = 8 + 60 // page, 5 + (25 if tight else 60) // page
        context = 4 * page + 30 if short else full_pages * page
        self.pool = HybridKVPool(
            KINDS[kinds],
            max_tokens=full_pages * page,
            max_requests=REQUESTS,
            max_context=context,
            swa_tokens=swa_pages * page,
            page_size=page,
        )
        # Bookkeeping has no business in the caches: whatever lies there has to stay.
        for layer in range(len(KINDS[kinds])):
            self.pool.k_cache(layer).normal_()
            self.pool.v_cache(layer).normal_()
        self.caches = [b.clone() for b in self.cache_buffers()]
        self.addresses = [b.data_ptr() for b in self.pool.buffers()]
        window = self.pool.window
        assert window == max((s.window for s in KINDS[kinds] if s.window), default=None)
        self.book = Book(page, window, full_pages, swa_pages if window else 0, context)
        for _ in range(requests):
            self.open()

    def cache_buffers(self):
        return [b for name, b in self.pool.named_buffers() if "_cache_" in name]

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.book.full)))

    def has_requests(self):
        return bool(self.book.full)

    def snapshot(self):
        lengths = [self.pool.length(request) for request in self.book.full]
        tables = self.pool.page_table(list(self.book.full)).tolist()
        counts = (self.pool.full_free, self.pool.swa_free, lengths, tables)
        return counts, [buffer.clone() for buffer in self.pool.buffers()]

    def refused(self, error, call, words=None):
        """`call` raises and leaves every buffer and every count as it was."""
        counts, buffers = self.snapshot()
        with pytest.raises(error, match=words):
            call()
        counts_now, buffers_now = self.snapshot()
        assert counts == counts_now
        assert all(torch.equal(a, b) for a, b in zip(buffers, buffers_now, strict=True))

    def given(self, request, slots):
        """Write down what `request` was given, after a look at whether it was free."""
        page, book = self.page, self.book
        mapping = self.pool.full_to_swa_index_mapping.tolist()
        owned = {s // page for slots in book.full.values() for s in slots}
        held = {s // page for r, swa in book.swa.items() for s in swa[book.gone[r] :]}
        for slot in slots:
            position = book.length(request)
            swa = mapping[slot]
            assert slot % page == position % page
            if position % page:
                assert slot == book.full[request][-1] + 1
                assert book.window is None or swa == book.swa[request][-1] + 1
            else:
                assert 1 <= slot // page <= book.full_pages and slot // page not in owned
                owned.add(slot // page)
                if book.window is not None:
                    assert swa % page == 0
                    assert 1 <= swa // page <= book.swa_pages and swa // page not in held
                    held.add(swa // page)
            book.full[request].append(slot)
            book.swa[request].append(swa)

    @rule()
    def open(self):
        if len(self.book.full) == REQUESTS:
            self.refused(OutOfSlots, self.pool.open, "all 4 request rows are in use")
            return
        request = self.pool.open()
        assert 0 <= request < REQUESTS and request not in self.book.full
        self.book.full[request], self.book.swa[request] = [], []
        self.book.gone[request] = 0

    @precondition(has_requests)
    @rule(data=st.data(), evict=st.booleans())
    def extend(self, data, evict):
        request = self.some(data)
        tokens = data.draw(st.integers(0, self.page + 15))
        if not self.book.fits({request: tokens}, evict=False):
            self.refused(OutOfSlots, lambda: self.pool.extend(request, tokens))
        else:
            loc = self.pool.extend(request, tokens)
            assert loc.dtype == torch.int64 and loc.shape == (tokens,)
            self.given(request, loc.tolist())
        if evict:
            self.evict(data)

    @precondition(has_requests)
    @rule(data=st.data())
    def evict(self, data):
        request = self.some(data)
        assert self.pool.evict(request) == self.book.evict(request)
        assert self.pool.evict(request) == 0

    @precondition(has_requests)
    @rule(data=st.data())
    def truncate(self, data):
        """Back by some tokens, unless the next query would see what is evicted."""
        book, lengths, words = self.book, {}, None
        for request in self.chosen(data):
            there = book.length(request)
            length = data.draw(st.integers(max(0, there - self.page - 15), there))
            lengths[request] = length
            if book.window is not None and max(0, length - book.window + 1) < book.gone[request]:
                words = "its next query would see position"
        if words is not None:
            self.refused(ValueError, lambda: self.pool.truncate(lengths), words)
            return
        self.pool.truncate(lengths)
        for request, length in lengths.items():
            assert self.pool.length(request) == length
            del book.full[request][length:], book.swa[request][length:]

    def chosen(self, data):
        requests = st.sampled_from(sorted(self.book.full))
        return data.draw(st.lists(requests, unique=True, max_size=REQUESTS))

    @precondition(has_requests)
    @rule(data=st.data(), mapping=st.booleans())
    def prefill(self, data, mapping):
        tokens = st.integers(0, self.page + 15)
        pieces = [
            (r, range(first := data.draw(tokens), first + data.draw(tokens)))
            for r in self.chosen(data)
        ]
        self.batch(dict(pieces) if mapping else pieces)

    @precondition(has_requests)
    @rule(data=st.data(), steps=st.integers(1, 20))
    def decode(self, data, steps):
        chosen = self.chosen(data)
        for step in range(steps):
            self.batch({request: [2**40 + step] for request in chosen})

    def batch(self, pieces):
        items = list(pieces.items()) if isinstance(pieces, dict) else pieces
        counts = {request: len(ids) for request, ids in items}
        if not self.book.fits(counts, evict=True):
            self.refused(OutOfSlots, lambda: self.pool.batch(pieces))
            return
        batch = self.pool.batch(pieces)
        batch.validate()
        chosen = list(counts)
        starts = {request: self.book.length(request) for request in chosen}
        for request in chosen:
            self.book.evict(request)
        end = 0
        for request, ids in items:
            begin, end = end, end + len(ids)
            self.given(request, batch.out_cache_loc[begin:end].tolist())
            if self.book.window is not None:
                held = self.book.pages(request) - self.book.gone[request] // self.page
                assert held <= self.pool.swa_pages_bound(len(ids))
        assert batch.input_ids.tolist() == [i for _, ids in items for i in ids]
        assert batch.positions.tolist() == [
            starts[r] + i for r, n in counts.items() for i in range(n)
        ]
        assert batch.seq_lens.tolist() == [self.book.length(request) for request in chosen]
        assert batch.cu_seqlens_q.tolist() == np.cumsum([0, *counts.values()]).tolist()
        width = 1
        while width < max((self.book.pages(request) for request in chosen), default=0):
            width *= 2
        assert batch.page_table.shape == (len(chosen), width)
        for request, row in zip(chosen, batch.page_table.tolist(), strict=True):
            pages = [slot // self.page for slot in self.book.full[request][:: self.page]]
            assert row == pages + [0] * (width - len(pages))
        mapping = batch.full_to_swa_index_mapping
        assert mapping.data_ptr() == self.pool.full_to_swa_index_mapping.data_ptr()

    @precondition(lambda self: len(self.book.full) > 1)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def batch_whose_last_request_does_not_fit(self, data, tokens):
        first, last = data.draw(st.permutations(sorted(self.book.full)))[:2]
        more = self.book.free_pages()[0] * self.page + self.page
        pieces = [(first, [1] * tokens), (last, [2] * more)]
        self.refused(OutOfSlots, lambda: self.pool.batch(pieces))

    @precondition(has_requests)
    @rule(data=st.data())
    def wrong_calls(self, data):
        request = self.some(data)
        pool, nobody = self.pool, REQUESTS
        pages = self.book.pages(request, 1)
        self.refused(KeyError, lambda: pool.extend(nobody, 1), "no open request 4")
        self.refused(KeyError, lambda: pool.batch([(request, [1]), (nobody, [1])]))
        self.refused(ValueError, lambda: pool.extend(request, -1), "extended by -1 tokens")
        self.refused(ValueError, lambda: pool.batch([(request, [1])] * 2), "stands twice")
        self.refused(ValueError, lambda: pool.batch({request: [1]}, width=pages - 1), "of width")
        self.refused((TypeError, OutOfSlots), lambda: pool.batch({request: [1.5]}))

    @precondition(has_requests)
    @rule(data=st.data())
    def close(self, data):
        request = self.some(data)
        self.pool.close(request)
        del self.book.full[request], self.book.swa[request], self.book.gone[request]
        self.refused(KeyError, lambda: self.pool.close(request), f"no open request {request}")

    @invariant()
    def pool_holds_what_the_book_says(self):
        if not hasattr(self, "pool"):
            return
        pool, book, page = self.pool, self.book, self.page
        mapping = pool.full_to_swa_index_mapping.numpy()
        np.testing.assert_array_equal(mapping, book.mapping())
        full_free, swa_free = book.free_pages()
        assert (pool.full_free, pool.swa_free) == (full_free * page, max(0, swa_free) * page)
        table = np.zeros((REQUESTS, book.context), dtype=np.int32)
        for request, slots in book.full.items():
            assert pool.length(request) == len(slots)
            table[request, : len(slots)] = slots
        np.testing.assert_array_equal(pool.req_to_token.numpy(), table)

    @invariant()
    def tokens_have_slots_of_their_own(self):
        """The same from the semantics alone, whatever the book says of pages."""
        if not hasattr(self, "pool"):
            return
        page, mapping = self.page, self.pool.full_to_swa_index_mapping.tolist()
        table = self.pool.req_to_token.tolist()
        live = [slot for r in self.book.full for slot in table[r][: self.pool.length(r)]]
        assert len(live) == len(set(live))
        assert all(page <= slot < page + self.pool.full_tokens for slot in live)
        assert mapping[-1] == -1 and not any(mapping[:page])
        if self.book.window is None:
            return
        mapped = [mapping[slot] for slot in live if mapping[slot]]
        assert len(mapped) == len(set(mapped))
        assert all(page <= slot < page + self.pool.swa_tokens for slot in mapped)
        for request in self.book.full:
            first, length = self.book.first_visible(request), self.pool.length(request)
            assert all(mapping[slot] for slot in table[request][first:length])
            assert not any(mapping[slot] for slot in table[request][: self.book.gone[request]])

    @invariant()
    def caches_and_addresses_stay(self):
        if hasattr(self, "pool"):
            assert [b.data_ptr() for b in self.pool.buffers()] == self.addresses
            now = self.cache_buffers()
            assert all(torch.equal(a, b) for a, b in zip(self.caches, now, strict=True))

    @invariant()
    def the_pools_own_check_agrees(self):
        if hasattr(self, "pool"):
            check(self.pool)


Lives.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestLives = Lives.TestCase
