"""`BucketRunner` on batches with requests: tokens and requests are padded, each to its own size."""

import pytest
import torch

from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec
from swa_compile.runner import BucketRunner


def seen(batch):
    """What a forward gets, a row a token and a row a request."""
    return {
        "ids": batch.input_ids * 1,
        "loc": batch.out_cache_loc * 1,
        "lens": batch.seq_lens * 1,
        "table": batch.page_table * 1,
        "cu": batch.cu_seqlens_q.clone()[None],
    }


@pytest.fixture
def pool():
    specs = [LayerSpec("full", 1, 2), LayerSpec("swa", 1, 2, window=8)]
    return HybridKVPool(specs, max_tokens=64, max_requests=6)


def test_decode_pads_requests_along(pool):
    runner = BucketRunner(seen, [4, 8])
    requests = [pool.open() for _ in range(3)]
    for _ in range(2):
        batch = pool.batch({r: [7] for r in requests}, width=4)
        out = runner(batch)
        assert torch.equal(out["ids"], batch.input_ids) and torch.equal(
            out["loc"], batch.out_cache_loc
        )
        assert torch.equal(out["lens"], batch.seq_lens)
        assert torch.equal(out["table"], batch.page_table)
        assert out["cu"].tolist() == [[0, 1, 2, 3, 3]]
    assert [(use.tokens, use.requests) for use in runner.buckets] == [(4, 4), (8, 8)]


def test_extend_pads_tokens_and_requests_apart(pool):
    """Rows a token are told from rows a request also where both fall into one bucket."""
    runner = BucketRunner(seen, [4, 8])
    a, b, c = (pool.open() for _ in range(3))
    batch = pool.batch({a: [1, 2, 3], b: [4], c: [5, 6, 7]}, width=4)
    out = runner(batch)
    assert torch.equal(out["ids"], batch.input_ids)
    assert torch.equal(out["lens"], batch.seq_lens)
    assert out["cu"].tolist() == [[0, 3, 4, 7, 7]]
    pieces = {pool.open(): [1, 2], pool.open(): [3], pool.open(): [4]}
    batch = pool.batch(pieces, width=4)
    out = runner(batch)  # 4 tokens of 3 requests: both would be 4
    assert torch.equal(out["ids"], batch.input_ids)
    assert torch.equal(out["lens"], batch.seq_lens)
    assert (4, 5) in [(use.tokens, use.requests) for use in runner.buckets]


def test_an_idle_rank_runs_the_smallest_bucket(pool):
    runner = BucketRunner(seen, [4, 8])
    out = runner(pool.batch({}, width=4))
    assert out["ids"].shape == (0,) and out["table"].shape == (0, 4)
    assert out["cu"].tolist() == [[0] * 5]


def test_a_batch_is_padded_as_forward_batch_pads_it(pool):
    got = []
    runner = BucketRunner(lambda batch: got.append(batch), [8])
    request = pool.open()
    runner(pool.batch({request: [1, 2, 3]}, width=8))
    batch = pool.batch({request: [4, 5]}, width=8)
    runner(batch)
    want = batch.pad(8, 9)
    for name, tensor in vars(want).items():
        assert torch.equal(getattr(got[-1], name), tensor), name
    assert got[-1].full_to_swa_index_mapping is pool.full_to_swa_index_mapping


def test_the_way_of_calling_stays(pool):
    runner = BucketRunner(lambda batch: None, [8])
    batch = pool.batch({pool.open(): [1]}, width=4)
    runner(batch)
    with pytest.raises(TypeError, match="ForwardBatch; got keyword"):
        runner(**vars(batch))
    with pytest.raises(TypeError, match="not both"):
        runner(batch, input_ids=batch.input_ids)
    with pytest.raises(TypeError, match="expected a ForwardBatch; got int"):
        runner(3)
    assert isinstance(batch, ForwardBatch)
