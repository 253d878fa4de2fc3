"""Layers that attend by chunks (Llama 4), and what a pool holds for its bytes."""

import numpy as np
import pytest

from swa_compile.kv import HybridKVPool, LayerSpec, check

CHUNKED = LayerSpec("swa", 1, 2, window=8, chunked=True)


def make(*layers, **sizes):
    return HybridKVPool(layers, **{"max_tokens": 64, "max_requests": 2, **sizes})


def live(pool, request):
    """Positions that have an SWA slot."""
    slots = pool.req_to_token[request, : pool.length(request)].long()
    return pool.full_to_swa_index_mapping[slots].nonzero().flatten().tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chunk_is_evicted_when_the_next_begins(page_size):
    pool = make(CHUNKED, page_size=page_size)
    request = pool.open()
    for position in range(30):
        pool.batch({request: [7]})
        check(pool)
        assert live(pool, request) == list(range(position // 8 * 8, position + 1))


def test_beside_a_sliding_layer_what_either_sees_is_kept():
    pool = make(CHUNKED, LayerSpec("swa", 1, 2, window=3))
    request = pool.open()
    for position in range(30):
        pool.batch({request: [7]})
        first = min(position // 8 * 8, max(0, position - 2))
        assert live(pool, request) == list(range(first, position + 1))


def test_a_piece_that_passes_the_end_of_a_chunk_is_refused(unchanged):
    pool = make(CHUNKED)
    request = pool.open()
    pool.batch({request: [1] * 6})
    assert pool.piece_bound(request) == 2
    with unchanged(pool), pytest.raises(ValueError, match="2 tokens ahead of the end of a chunk"):
        pool.batch({request: [1] * 3})
    pool.batch({request: [1] * 2})
    assert pool.piece_bound(request) == 8


def test_without_chunks_a_piece_has_no_bound():
    pool = make(LayerSpec("swa", 1, 2, window=8))
    assert pool.piece_bound(pool.open()) is None


def test_chunks_are_whole_pages():
    with pytest.raises(ValueError, match="chunks of 8 tokens are no whole number of pages of 3"):
        make(CHUNKED, page_size=3)


def test_a_full_layer_has_no_chunks():
    with pytest.raises(ValueError, match="chunked is False"):
        LayerSpec("full", 1, 2, chunked=True)


def test_a_gemma_3_pool_holds_three_times_the_tokens_of_a_full_only_pool_of_its_bytes():
    """Gemma 3 27B: 62 layers, five of six sliding with a window of 1,024. On one GPU's worth."""
    kv_heads, dim, itemsize, requests, tokens = 16, 128, 4, 1, 24_576
    scale = 16  # heads and dimensions are the same in every layer, and cancel out
    kinds = [None if i % 6 == 5 else 1024 for i in range(62)]
    layers = [
        LayerSpec("swa" if w else "full", kv_heads // scale, dim // scale, window=w) for w in kinds
    ]
    pool = HybridKVPool(layers, max_tokens=tokens, max_requests=requests)
    held = sum(
        np.prod(buffer.shape) * itemsize for name, buffer in pool.named_buffers() if "cache" in name
    )
    per_token = 62 * 2 * (kv_heads // scale) * (dim // scale) * itemsize
    full_only = held // per_token - 1  # the sink takes one
    assert pool.full_only_tokens() == full_only
    assert pool.full_tokens == tokens >= 3 * full_only
