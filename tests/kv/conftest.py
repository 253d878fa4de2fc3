"""Pools, and what has to stay as it was when a pool refuses something."""

from contextlib import contextmanager

import pytest
import torch

from swa_compile.kv import HybridKVPool, LayerSpec, check

FULL = LayerSpec("full", 1, 2)


@pytest.fixture
def make_pool():
    """make_pool(window, **sizes): a full and a sliding layer; window None: the full one alone."""

    def make(window=8, **sizes):
        specs = [FULL] if window is None else [FULL, LayerSpec("swa", 1, 2, window=window)]
        return HybridKVPool(specs, **{"max_tokens": 64, "max_requests": 3, **sizes})

    return make


@pytest.fixture
def unchanged():
    """with unchanged(pool): every buffer, address and count is afterwards what it was before."""

    def state(pool):
        lengths = {row: pool.length(row) for row in pool._ledger.requests}
        pointers = [buffer.data_ptr() for buffer in pool.buffers()]
        return pool.full_free, pool.swa_free, lengths, pointers

    @contextmanager
    def compare(pool):
        before, buffers = state(pool), [buffer.clone() for buffer in pool.buffers()]
        yield
        assert state(pool) == before
        assert all(torch.equal(a, b) for a, b in zip(buffers, pool.buffers(), strict=True))
        check(pool)

    return compare
