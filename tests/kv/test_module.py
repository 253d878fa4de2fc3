"""A pool as part of a model: it moves, and stays out of checkpoints."""

import copy

import pytest
import torch
from torch import nn

from swa_compile.kv import check


class Model(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.pool = pool


def test_caches_are_no_part_of_a_checkpoint(make_pool):
    model = Model(make_pool())
    assert sorted(model.state_dict()) == ["linear.bias", "linear.weight"]
    assert sum(1 for _ in model.buffers()) == 2 * 2 + 2
    model.pool.extend(model.pool.open(), 3)
    other = Model(make_pool(max_tokens=16))  # a pool of another size is no obstacle
    other.load_state_dict(model.state_dict(), strict=True)
    check(other.pool)


def test_moving_to_where_it_is_keeps_addresses_and_requests(make_pool):
    model = Model(make_pool())
    request = model.pool.open()
    model.pool.extend(request, 5)
    addresses = [buffer.data_ptr() for buffer in model.buffers()]
    model.to("cpu").eval().requires_grad_(False)
    assert [buffer.data_ptr() for buffer in model.buffers()] == addresses
    assert model.pool.batch({request: [1]}).positions.tolist() == [5]
    check(model.pool)


def test_casting_a_model_casts_caches_and_no_index(make_pool):
    model = Model(make_pool())
    request = model.pool.open()
    model.pool.extend(request, 5)
    before = model.pool.nbytes()
    model.to(torch.bfloat16)
    assert model.pool.k_cache(1).dtype == torch.bfloat16
    assert model.pool.full_to_swa_index_mapping.dtype == torch.int64
    assert model.pool.req_to_token.dtype == torch.int32
    assert model.pool.nbytes() == {kind: size // 2 for kind, size in before.items()}
    model.pool.batch({request: [1]}).validate()
    check(model.pool)


def test_batches_are_on_the_device_that_the_model_moved_to(make_pool):
    """The meta device stands for another one: what is not moved along would show."""
    pool = make_pool()
    request = pool.open()
    pool.extend(request, 5)
    Model(pool).to("meta")
    batch = pool.batch({request: [1, 2]})
    batch.validate()
    assert {tensor.device.type for tensor in vars(batch).values()} == {"meta"}
    assert pool.extend(request, 2).device.type == "meta"
    assert (pool.length(request), pool.full_free, pool.evict(request)) == (9, 55, 2)
    pool.close(request)
    assert pool.full_free == 64


@pytest.mark.parametrize("page", [1, 16])
def test_default_device_of_the_caller_is_no_concern_of_the_pool(make_pool, page):
    pool = make_pool(page_size=page)
    with torch.device("meta"):
        request = pool.open()
        batch = pool.batch({request: [1, 2]})
        pool.extend(request, 20)
        pool.evict(request)
        check(pool)
        pool.page_table([request])
        pool.close(request)
    assert batch.out_cache_loc.tolist() == [page, page + 1]
    check(pool)


def test_life_goes_on_under_inference_mode_and_after_it(make_pool):
    pool = make_pool(4)
    with torch.inference_mode():
        request = pool.open()
        pool.batch({request: [1] * 6})
    pool.batch({request: [1]})
    pool.close(request)
    check(pool)


def test_copy_of_a_model_has_a_pool_of_its_own(make_pool, unchanged):
    model = Model(make_pool())
    request = model.pool.open()
    model.pool.extend(request, 5)
    twin = copy.deepcopy(model)
    with unchanged(model.pool):
        assert twin.pool.batch({request: [1]}).positions.tolist() == [5]
        twin.pool.close(request)
        check(twin.pool)
