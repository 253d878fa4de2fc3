"""Rows stored through a pool's indices are the rows that are found through them.

Each token's row holds a number of its own, so that a slot which two tokens shared, or one given to
another too early, shows as the wrong number. Caches begin as NaN: a slot never written shows too.
"""

import numpy as np
import pytest
import torch

from swa_compile.kv import HybridKVPool, LayerSpec, OutOfSlots, check
from swa_compile.ops import store_kv, translate_loc, translate_page_table

LAYERS = [
    LayerSpec("full", 2, 3),
    LayerSpec("swa", 1, 4, 2, window=9),
    LayerSpec("swa", 2, 2, window=21),
    LayerSpec("full", 1, 2, 5),
]
WIDEST = 21


class Tokens:
    """What was stored: per request, the number of each token; and what has to be found."""

    def __init__(self, pool):
        self.pool = pool
        self.numbers = {}
        self.visible_from = {}
        self.stored = 0
        for layer in range(len(LAYERS)):
            pool.k_cache(layer).fill_(torch.nan)
            pool.v_cache(layer).fill_(torch.nan)

    def forget_before(self, request):
        """The next query of `request` sees the widest window, itself included."""
        first = len(self.numbers[request]) - WIDEST + 1
        self.visible_from[request] = max(self.visible_from[request], first)

    def store(self, batch, counts):
        """One forward. Padding lanes store numbers that no token has."""
        for request, count in counts.items():
            self.forget_before(request)
            self.numbers[request] += range(self.stored, self.stored + count)
            self.stored += count
        live = sum(counts.values())
        lanes = batch.out_cache_loc.shape[0]
        numbers = torch.full((lanes,), -1e6)
        numbers[:live] = torch.arange(self.stored - live, self.stored)
        swa = translate_loc(batch.full_to_swa_index_mapping, batch.out_cache_loc)
        for layer, spec in enumerate(LAYERS):
            k, v = self.pool.k_cache(layer), self.pool.v_cache(layer)
            rows = numbers.view(-1, 1, 1) + layer / 8
            loc = swa if spec.kind == "swa" else batch.out_cache_loc
            store_kv(k, v, rows.expand(-1, *k.shape[1:]), -rows.expand(-1, *v.shape[1:]), loc)

    def compare(self):
        """Read each request back, in full layers whole, in sliding ones what can be seen."""
        requests = [request for request, numbers in self.numbers.items() if numbers]
        page, mapping = self.pool.page_size, self.pool.full_to_swa_index_mapping
        table = self.pool.page_table(requests)
        tables = {"full": table.long(), "swa": translate_page_table(mapping, table, page)}
        for row, request in enumerate(requests):
            numbers = torch.tensor(self.numbers[request], dtype=torch.float32)
            for layer, spec in enumerate(LAYERS):
                first = self.visible_from[request] if spec.kind == "swa" else 0
                at = torch.arange(first, len(numbers))
                slots = tables[spec.kind][row, at // page] * page + at % page
                assert (slots >= page).all(), "nobody reads the sink for a live token"
                k, v = self.pool.k_cache(layer)[slots], self.pool.v_cache(layer)[slots]
                want = (numbers[at] + layer / 8).view(-1, 1, 1)
                assert torch.equal(k, want.expand_as(k)), (request, layer)
                assert torch.equal(v, -want.expand_as(v)), (request, layer)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page", [1, 16, 64])
def test_each_visible_token_is_found_where_it_was_stored(page, seed):
    rng = np.random.default_rng([page, seed])
    pool = HybridKVPool(
        LAYERS,
        max_tokens=9 * page + 90,
        max_requests=4,
        max_context=4 * page + 60,
        swa_tokens=6 * page + 40,
        page_size=page,
    )
    tokens = Tokens(pool)
    refused = 0
    for _ in range(150):
        requests = list(tokens.numbers)
        move = rng.choice(
            ["open", "close", "evict", "prefill", "decode"], p=[0.1, 0.08, 0.1, 0.3, 0.42]
        )
        if move == "open" and len(requests) < 4:
            request = pool.open()
            tokens.numbers[request], tokens.visible_from[request] = [], 0
        elif move == "close" and requests:
            request = int(rng.choice(requests))
            pool.close(request)
            del tokens.numbers[request], tokens.visible_from[request]
        elif move == "evict" and requests:
            request = int(rng.choice(requests))
            pool.evict(request)
            tokens.forget_before(request)
        elif move in ("prefill", "decode") and requests:
            chosen = rng.permutation(requests)[: rng.integers(1, len(requests) + 1)].tolist()
            most = 1 if move == "decode" else page + 14
            counts = {r: int(rng.integers(0, most + 1)) for r in chosen}
            try:
                batch = pool.batch({r: [0] * n for r, n in counts.items()})
            except OutOfSlots:
                refused += 1
                continue
            if rng.random() < 0.5:
                batch = batch.pad(batch.input_ids.shape[0] + 3, len(chosen) + 1)
            tokens.store(batch, counts)
        tokens.compare()
    check(pool)
    assert tokens.stored > 2 * pool.swa_tokens, "slots served more than once"
    assert refused > 0, "pools were full now and then"
