"""Exact small cases, errors, and rows written through the mapping read back right."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec, OutOfSlots, PoolCorrupt, check
from swa_compile.ops import store_kv, translate_loc, translate_page_table

SPECS = [LayerSpec("full", 2, 4), LayerSpec("swa", 1, 3, 2, window=8)]


def make(**sizes):
    options = {"max_tokens": 64, "max_requests": 3, "swa_tokens": 48, **sizes}
    return HybridKVPool(SPECS, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "half"}, "kind is 'full', 'swa' or 'compressed'; got 'half'"),
        ({"kind": "swa"}, "window is wanted"),
        ({"kind": "full", "window": 3}, "window is None for a layer of kind 'full'"),
        ({"kind": "swa", "window": 0}, "window is an int of at least 1; got 0"),
        ({"kind": "full", "kv_heads": 0}, "kv_heads is an int of at least 1; got 0"),
        ({"kind": "full", "v_dim": True}, "v_dim is an int of at least 1; got True"),
        ({"kind": "full", "v_dim": 3, "shared": True}, "v_dim is k_dim, 2, where K and V are sha"),
        ({"kind": "compressed"}, "ratio is wanted for a layer of kind 'compressed'"),
        ({"kind": "compressed", "ratio": 0}, "ratio is an int of at least 1; got 0"),
        ({"kind": "compressed", "ratio": 4, "window": 3}, "window is None for a layer of kind 'c"),
        ({"kind": "full", "ratio": 4}, "ratio .* is None for one of kind 'full'; got 4"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        LayerSpec(**{"kv_heads": 1, "k_dim": 2, **arguments})


@pytest.mark.parametrize("name", ["max_tokens", "max_requests", "max_context", "swa_tokens"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is an int of at least 1; got 0"):
        make(**{name: 0})


def test_page_size_0_and_no_layers_are_refused():
    with pytest.raises(ValueError, match="page_size is an int of at least 1; got 0"):
        make(page_size=0)
    with pytest.raises(ValueError, match="at least one layer"):
        HybridKVPool([], max_tokens=8, max_requests=1)


def test_capacities_are_whole_pages_and_caches_hold_the_sink_too():
    pool = make(max_tokens=50, swa_tokens=17, page_size=16)
    assert (pool.full_tokens, pool.swa_tokens) == (64, 32)
    assert pool.k_cache(0).shape == (80, 2, 4)
    assert (pool.k_cache(1).shape, pool.v_cache(1).shape) == ((48, 1, 3), (48, 1, 2))
    assert pool.full_to_swa_index_mapping.shape == (64 + 16 + 1,)
    assert pool.full_to_swa_index_mapping.dtype == torch.int64
    assert not pool.state_dict()
    with pytest.raises(IndexError, match="layer 2 of a pool of 2 layers"):
        pool.k_cache(2)


def test_bytes_of_the_pools_and_of_a_pool_without_the_second():
    pool = make()
    rows = {"full": 65 * 2 * (4 + 4) * 4, "swa": 49 * 1 * (3 + 2) * 4}
    assert pool.nbytes() == rows
    assert pool.full_only_nbytes() == 65 * (16 + 5) * 4


def test_eviction_is_exact_to_the_token():
    """A query at position p sees p - window + 1 and later; the next query stands at `length`."""
    pool = make()
    request = pool.open()
    slots = pool.extend(request, 8)
    assert pool.evict(request) == 1  # position 0 is out of sight for a query at 8
    mapped = pool.full_to_swa_index_mapping[slots]
    assert mapped.tolist()[0] == 0 and (mapped[1:] > 0).all()
    pool.extend(request, 1)
    assert pool.evict(request) == 1
    assert pool.full_to_swa_index_mapping[slots].tolist()[1] == 0


def test_eviction_frees_whole_pages_only():
    pool = make(page_size=16, swa_tokens=64)
    request = pool.open()
    pool.extend(request, 16 + 6)
    assert pool.evict(request) == 0  # a query at 22 sees position 15, in page 0
    pool.extend(request, 1)
    assert pool.evict(request) == 16


def test_a_chunked_prefill_longer_than_the_swa_pool_fits():
    pool = make(swa_tokens=20, max_context=100)
    request = pool.open()
    for start in range(0, 60, 10):
        batch = pool.batch({request: list(range(start, start + 10))})
        assert batch.positions.tolist() == list(range(start, start + 10))
    with pytest.raises(OutOfSlots, match=r"full pool has 4 of 64 pages of 1 tokens free; 5 were"):
        pool.batch({request: [0] * 5})


def test_a_batch_of_which_one_request_does_not_fit_changes_nothing():
    pool = make(max_tokens=20, max_context=20)
    a, b = pool.open(), pool.open()
    pool.batch({a: [1] * 12, b: [2]})
    before = [buffer.clone() for buffer in pool.buffers()]
    with pytest.raises(OutOfSlots):
        pool.batch({a: [3], b: [4] * 9})
    assert all(torch.equal(x, y) for x, y in zip(before, pool.buffers(), strict=True))
    assert (pool.length(a), pool.length(b)) == (12, 1)


def test_wrong_calls_are_named():
    pool = make(max_context=10)
    request = pool.open()
    with pytest.raises(KeyError, match="no open request 7"):
        pool.extend(7, 1)
    with pytest.raises(ValueError, match="cannot be extended by -1"):
        pool.extend(request, -1)
    with pytest.raises(OutOfSlots, match="the context is 10"):
        pool.extend(request, 11)
    with pytest.raises(ValueError, match="stands twice"):
        pool.batch([(request, [1]), (request, [2])])
    with pytest.raises(ValueError, match="width 1 cannot hold 3 pages"):
        pool.batch([(request, [1, 2, 3])], width=1)
    assert pool.length(request) == 0


def test_an_empty_batch_is_a_batch():
    batch = make().batch([])
    batch.validate()
    assert batch.input_ids.shape == (0,) and batch.page_table.shape[0] == 0
    assert batch.cu_seqlens_q.tolist() == [0]


def test_padding_goes_to_the_sink_and_adds_empty_requests():
    pool = make()
    batch = pool.batch({pool.open(): [5, 6], pool.open(): [7]}, width=4).pad(6, 4)
    batch.validate()
    assert batch.out_cache_loc[3:].tolist() == [0, 0, 0]
    assert batch.seq_lens.tolist() == [2, 1, 0, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="cannot be padded"):
        batch.pad(5, 4)


def test_a_batch_of_the_wrong_form_is_refused_by_field():
    pool = make()
    batch = pool.batch({pool.open(): [5, 6]})
    batch.page_table = batch.page_table.long()
    with pytest.raises(TypeError, match=r"ForwardBatch.page_table is torch.int32"):
        batch.validate()
    batch = pool.batch({pool.open(): [5, 6]})
    batch.positions = batch.positions[:1]
    with pytest.raises(ValueError, match=r"ForwardBatch.positions has 2 rows"):
        batch.validate()


def test_a_batch_is_a_pytree_and_an_argument_of_compiled_code():
    pool = make()
    batch = pool.batch({pool.open(): [5, 6]})
    leaves, spec = pytree.tree_flatten(batch)
    assert len(leaves) == 7 and isinstance(pytree.tree_unflatten(leaves, spec), ForwardBatch)
    forward = torch.compile(
        lambda b: b.input_ids + b.positions, backend="aot_eager", fullgraph=True
    )
    assert forward(batch).tolist() == [5, 7]


def test_check_finds_a_mapping_that_somebody_edited():
    pool = make()
    request = pool.open()
    slot = pool.extend(request, 3)[1]
    check(pool)
    pool.full_to_swa_index_mapping[slot] = 40
    with pytest.raises(PoolCorrupt, match=f"full slot {int(slot)} to 40"):
        check(pool)


@pytest.mark.parametrize("page", [1, 16])
def test_rows_written_through_the_mapping_are_read_back_for_the_whole_window(page):
    """Random lives; every visible token's row is the one that was written for it."""
    rng = np.random.default_rng(page)
    pool = make(max_tokens=8 * page + 60, max_requests=3, swa_tokens=5 * page + 40, page_size=page)
    written = {}
    requests = {}
    for step in range(120):
        choice = rng.integers(3)
        if choice == 0 and len(requests) < 3:
            requests[pool.open()] = 0
        elif choice == 1 and requests and rng.random() < 0.2:
            request = int(rng.choice(sorted(requests)))
            pool.close(request)
            del requests[request]
        elif requests:
            request = int(rng.choice(sorted(requests)))
            count = int(rng.integers(0, 9))
            try:
                batch = pool.batch({request: [0] * count})
            except OutOfSlots:
                continue
            values = (
                torch.full((count, 1, 1), float(step)) + torch.arange(count)[:, None, None] / 64
            )
            for i in range(count):
                written[request, requests[request] + i] = float(values[i])
            requests[request] += count
            loc = batch.out_cache_loc
            wide = values.expand(count, 2, 4)
            store_kv(pool.k_cache(0), pool.v_cache(0), wide, wide, loc)
            loc = translate_loc(batch.full_to_swa_index_mapping, loc)
            store_kv(
                pool.k_cache(1),
                pool.v_cache(1),
                values.expand(count, 1, 3),
                values.expand(count, 1, 2),
                loc,
            )
            for owner, length in requests.items():
                if not length:
                    continue
                table = pool.page_table([owner])
                swa = translate_page_table(pool.full_to_swa_index_mapping, table, page)[0]
                for position in range(length):
                    slot = int(table[0, position // page]) * page + position % page
                    assert pool.k_cache(0)[slot, 0, 0] == written[owner, position]
                    if position > length - 8:  # what the next query sees
                        slot = int(swa[position // page]) * page + position % page
                        assert pool.k_cache(1)[slot, 0, 0] == written[owner, position]
                        assert pool.v_cache(1)[slot, 0, 1] == written[owner, position]
    assert len(written) > 100
