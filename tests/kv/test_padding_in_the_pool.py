"""`HybridKVPool.batch(pad_to=...)` and `HybridKVPool.check`."""

import pytest
import torch

from swa_compile.kv import PoolCorrupt


def test_padding_asked_of_the_pool_is_that_of_the_batch(make_pool):
    one, two = make_pool(), make_pool()
    padded = one.batch({one.open(): [5, 6]}, pad_to=(4, 3))
    by_hand = two.batch({two.open(): [5, 6]}).pad(4, 3)
    padded.validate()
    for name in vars(padded):
        assert torch.equal(getattr(padded, name), getattr(by_hand, name)), name
    assert padded.out_cache_loc[2:].tolist() == [0, 0]
    assert padded.cu_seqlens_q.tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize(
    ("pad_to", "error"), [((1, 1), ValueError), ((4, 0), ValueError), ((4.0, 1), TypeError)]
)
def test_padding_that_cannot_be_changes_nothing(make_pool, unchanged, pad_to, error):
    pool = make_pool()
    request = pool.open()
    pool.extend(request, 20)  # so that the batch would also evict
    with unchanged(pool), pytest.raises(error):
        pool.batch({request: [1, 2]}, pad_to=pad_to)


def test_check_is_a_method_too(make_pool):
    pool = make_pool()
    pool.extend(pool.open(), 3)
    pool.check()
    pool.req_to_token[0, 0] = 9
    with pytest.raises(PoolCorrupt, match="req_to_token of row 0"):
        pool.check()
