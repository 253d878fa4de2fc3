"""Long random lives of requests against a model of the pool in plain Python."""

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
    "all sliding": [LayerSpec("swa", 1, 2, window=5)],
    "all full": [FULL],
}
REQUESTS = 4


class Lives(RuleBasedStateMachine):
    """The model: how many tokens each open request has, and which of them a query can still see."""

    @initialize(kinds=st.sampled_from(sorted(KINDS)), page=st.sampled_from([1, 16, 64]))
    def make(self, kinds, page):
        self.page = page
        self.pool = HybridKVPool(
            KINDS[kinds],
            max_tokens=6 * page + 40,
            max_requests=REQUESTS,
            max_context=4 * page + 30,
            swa_tokens=4 * page + 24,
            page_size=page,
        )
        self.window = self.pool.window
        self.lengths = {}
        self.seen = {}  # request -> first position that has to be in the SWA pool
        self.addresses = [buffer.data_ptr() for buffer in self.pool.buffers()]

    def snapshot(self):
        buffers = [buffer.clone() for buffer in self.pool.buffers()]
        return buffers, self.pool.full_free, self.pool.swa_free, dict(self.lengths)

    def unchanged(self, before):
        buffers, *counts = before
        now, *counts_now = self.snapshot()
        assert counts == counts_now
        assert all(torch.equal(a, b) for a, b in zip(buffers, now, strict=True))

    @rule()
    def open(self):
        if len(self.lengths) == REQUESTS:
            before = self.snapshot()
            with pytest.raises(OutOfSlots, match="request rows"):
                self.pool.open()
            self.unchanged(before)
            return
        request = self.pool.open()
        assert request not in self.lengths
        self.lengths[request] = 0
        self.seen[request] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def extend(self, data, tokens):
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        before = self.snapshot()
        try:
            loc = self.pool.extend(request, tokens)
        except OutOfSlots:
            self.unchanged(before)
            return
        assert loc.dtype == torch.int64 and len(set(loc.tolist())) == tokens
        start = self.lengths[request]
        self.lengths[request] += tokens
        row = self.pool.req_to_token[request]
        assert row[start : start + tokens].tolist() == loc.tolist()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def evict(self, data):
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        self.pool.evict(request)
        self.note_evicted(request)

    def note_evicted(self, request):
        if self.window is not None:
            first = max(self.seen[request], self.lengths[request] - self.window + 1)
            self.seen[request] = first

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def batch(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True))
        pieces = [(r, data.draw(st.lists(st.integers(0, 9), max_size=30))) for r in chosen]
        before = self.snapshot()
        try:
            batch = self.pool.batch(pieces)
        except OutOfSlots:
            self.unchanged(before)
            return
        batch.validate()
        offsets = [0]
        for request, ids in pieces:
            self.note_evicted(request)
            start = self.lengths[request]
            self.lengths[request] += len(ids)
            part = slice(offsets[-1], offsets[-1] + len(ids))
            assert batch.input_ids[part].tolist() == ids
            assert batch.positions[part].tolist() == list(range(start, start + len(ids)))
            slots = self.pool.req_to_token[request][start : start + len(ids)].tolist()
            assert batch.out_cache_loc[part].tolist() == slots
            offsets.append(part.stop)
        assert batch.cu_seqlens_q.tolist() == offsets
        assert batch.seq_lens.tolist() == [self.lengths[request] for request, _ in pieces]
        for i, (request, _) in enumerate(pieces):
            positions = np.arange(self.lengths[request])
            pages = batch.page_table[i].numpy()
            slots = pages[positions // self.page] * self.page + positions % self.page
            assert slots.tolist() == self.pool.req_to_token[request][: len(slots)].tolist()
            assert not pages[-(-len(slots) // self.page) :].any()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def close(self, data):
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        self.pool.close(request)
        del self.lengths[request], self.seen[request]
        before = self.snapshot()
        with pytest.raises(KeyError):
            self.pool.close(request)
        self.unchanged(before)

    @invariant()
    def tokens_have_slots_of_their_own(self):
        if not hasattr(self, "pool"):
            return
        page, mapping = self.page, self.pool.full_to_swa_index_mapping.numpy()
        table = self.pool.req_to_token.numpy()
        assert mapping[-1] == -1 and not mapping[:page].any()
        full = [table[r][:n].tolist() for r, n in self.lengths.items()]
        flat = [slot for slots in full for slot in slots]
        assert len(flat) == len(set(flat))
        assert all(page <= slot < page + self.pool.full_tokens for slot in flat)
        pages = {(r, p // page) for r, n in self.lengths.items() for p in range(n)}
        assert self.pool.full_free == self.pool.full_tokens - len(pages) * page

        owners = {}
        for request, slots in zip(self.lengths, full, strict=True):
            for position, slot in enumerate(slots):
                swa = int(mapping[slot])
                if self.window is None:
                    assert swa == 0
                elif position >= self.seen[request]:
                    assert page <= swa < page + self.pool.swa_tokens, (request, position)
                if swa:
                    assert swa % page == slot % page, "a page moves as a whole"
                    assert owners.setdefault(swa, (request, position)) == (request, position)
        if self.window is not None:
            held = {(owner[0], owner[1] // page) for owner in owners.values()}
            assert self.pool.swa_free == self.pool.swa_tokens - len(held) * page

    @invariant()
    def the_pools_own_check_agrees(self):
        if hasattr(self, "pool"):
            check(self.pool)
            assert [buffer.data_ptr() for buffer in self.pool.buffers()] == self.addresses


Lives.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLives = Lives.TestCase
