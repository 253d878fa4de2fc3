"""The index tensors of one forward, number by number."""

import dataclasses

import pytest
import torch

from swa_compile.kv import ForwardBatch, host

FIELDS = [field.name for field in dataclasses.fields(ForwardBatch)]


def test_batch_of_two_requests_at_page_size_1(make_pool):
    pool = make_pool(4)
    a, b = pool.open(), pool.open()
    pool.batch({a: [10, 11, 12]})
    batch = pool.batch([(b, [20, 21]), (a, [13])])
    assert batch.input_ids.tolist() == [20, 21, 13]
    assert batch.positions.tolist() == [0, 1, 3]
    assert batch.out_cache_loc.tolist() == [4, 5, 6]
    assert batch.page_table.tolist() == [[4, 5, 0, 0], [1, 2, 3, 6]]
    assert batch.seq_lens.tolist() == [2, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3]
    assert batch.full_to_swa_index_mapping[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert pool.req_to_token[:, :5].tolist() == [[1, 2, 3, 6, 0], [4, 5, 0, 0, 0], [0] * 5]


def test_batch_of_two_requests_at_page_size_4(make_pool):
    pool = make_pool(4, page_size=4)
    a, b = pool.open(), pool.open()
    pool.batch({a: [1] * 6})  # pages 1, 2
    pool.batch({b: [1] * 3})  # page 3
    batch = pool.batch({a: [1] * 3, b: [1] * 2})  # page 2 filled, 4; page 3 filled, 5
    assert batch.positions.tolist() == [6, 7, 8, 3, 4]
    assert batch.out_cache_loc.tolist() == [10, 11, 16, 15, 20]
    assert batch.page_table.tolist() == [[1, 2, 4, 0], [3, 5, 0, 0]]
    assert batch.seq_lens.tolist() == [9, 5]
    assert batch.full_to_swa_index_mapping[4:24].tolist() == list(range(4, 24))
    batch = pool.batch({a: [1] * 4})  # page 1 is out of sight; its SWA page serves page 6
    assert batch.full_to_swa_index_mapping[[4, 7, 8, 16, 19, 24]].tolist() == [0, 0, 8, 16, 19, 4]


def test_freed_slots_serve_others_and_the_sink_never_does(make_pool):
    pool = make_pool(4, max_tokens=8)
    a = pool.open()
    first = pool.extend(a, 8)
    pool.close(a)
    assert not pool.full_to_swa_index_mapping[:-1].any() and not pool.req_to_token.any()
    b = pool.open()
    second = pool.extend(b, 8)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1, 9))


@pytest.mark.parametrize(
    ("length", "width"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (17, 8), (33, 16)]
)
def test_width_is_the_least_power_of_two_that_suffices(make_pool, length, width):
    pool = make_pool(page_size=4, swa_tokens=64)
    request = pool.open()
    batch = pool.batch({request: [1] * length})
    assert batch.page_table.shape == (1, width)
    assert torch.equal(batch.page_table, pool.page_table([request]))


def test_width_that_is_given_is_taken_or_refused(make_pool, unchanged):
    pool = make_pool(page_size=4)
    request = pool.open()
    assert pool.batch({request: [1] * 5}, width=2).page_table.tolist() == [[1, 2]]
    assert pool.page_table([request], 3).tolist() == [[1, 2, 0]]
    with unchanged(pool):
        for call in (
            lambda: pool.batch({request: [1] * 4}, width=2),
            lambda: pool.page_table([request], 1),
            lambda: pool.page_table([request], -1),
        ):
            with pytest.raises(ValueError, match=r"a page table of width -?\d cannot hold [23] p"):
                call()


@pytest.mark.parametrize("page", [1, 16])
def test_batch_of_nothing_keeps_its_dtypes_and_pads_to_a_bucket(make_pool, page):
    """An idle rank runs the same bucket as the others."""
    batch = make_pool(page_size=page).batch({})
    batch.validate()
    assert batch.page_table.shape == (0, 1)
    assert batch.cu_seqlens_q.tolist() == [0]
    padded = batch.pad(8, 4)
    padded.validate()
    assert padded.out_cache_loc.tolist() == [0] * 8
    assert padded.page_table.tolist() == [[0]] * 4
    assert padded.cu_seqlens_q.tolist() == [0] * 5


def test_request_may_have_no_new_tokens(make_pool):
    pool = make_pool()
    a, b, c = pool.open(), pool.open(), pool.open()
    pool.batch({b: [1, 2]})
    batch = pool.batch({a: [], b: [], c: [5]})
    assert batch.seq_lens.tolist() == [0, 2, 1]
    assert batch.cu_seqlens_q.tolist() == [0, 0, 0, 1]
    assert batch.page_table.tolist() == [[0, 0], [1, 2], [3, 0]]


def test_padding_changes_no_live_lane(make_pool):
    pool = make_pool()
    batch = pool.batch({pool.open(): [5, 6, 7], pool.open(): [8]})
    padded = batch.pad(6, 3)
    padded.validate()
    assert padded.input_ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert padded.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert padded.out_cache_loc.tolist() == [*batch.out_cache_loc.tolist(), 0, 0]
    assert padded.page_table.tolist() == [*batch.page_table.tolist(), [0] * 4]
    assert padded.seq_lens.tolist() == [3, 1, 0]
    assert padded.cu_seqlens_q.tolist() == [0, 3, 4, 4]
    assert padded.full_to_swa_index_mapping is batch.full_to_swa_index_mapping
    assert batch.pad(4, 2).out_cache_loc.tolist() == batch.out_cache_loc.tolist()
    for size in [(3, 2), (4, 1)]:
        with pytest.raises(ValueError, match="4 tokens and 2 requests cannot be padded to"):
            batch.pad(*size)


@pytest.mark.parametrize("name", FIELDS)
def test_field_of_another_dtype_or_rank_is_refused_by_name(make_pool, name):
    pool = make_pool()
    batch = pool.batch({pool.open(): [5, 6]})
    good = getattr(batch, name)
    for bad in (good.float(), good.to(torch.int16), good.tolist(), None):
        with pytest.raises(TypeError, match=rf"ForwardBatch\.{name} is torch\.int(32|64); got"):
            dataclasses.replace(batch, **{name: bad}).validate()
    for bad in (good[0], good[None]):
        if bad.dim() != good.dim():
            with pytest.raises(ValueError, match=rf"ForwardBatch\.{name} has rank [12]; got shape"):
                dataclasses.replace(batch, **{name: bad}).validate()


@pytest.mark.parametrize("name", ["positions", "out_cache_loc", "page_table", "cu_seqlens_q"])
def test_field_of_another_length_is_refused_by_name(make_pool, name):
    pool = make_pool()
    batch = pool.batch({pool.open(): [5, 6], pool.open(): [7]})
    good = getattr(batch, name)
    for bad in (good[:-1], torch.cat([good, good[:1]])):
        words = rf"ForwardBatch\.{name} has {len(good)} rows for 3 tokens of 2 requests; got"
        with pytest.raises(ValueError, match=f"{words} {len(bad)}"):
            dataclasses.replace(batch, **{name: bad}).validate()


def test_token_ids_may_be_lists_arrays_or_tensors(make_pool):
    pool = make_pool()
    ids = torch.tensor([3, 1, 2])
    for piece in (ids, ids.int().numpy(), (3, 1, 2), range(3)):
        batch = pool.batch({pool.open(): piece})
        assert batch.input_ids.tolist() == list(piece)
        pool.close(0)


@pytest.mark.parametrize("page", [1, 4])
def test_a_batch_is_two_copies_to_the_device_however_many_requests(make_pool, monkeypatch, page):
    copies = []
    to_device = host.to_device
    monkeypatch.setattr(host, "to_device", lambda t, *a: copies.append(t.dtype) or to_device(t, *a))
    pool = make_pool(4, page_size=page, max_requests=3, swa_tokens=48)
    requests = [pool.open() for _ in range(3)]
    pool.batch({request: [1] * 9 for request in requests})
    copies.clear()
    pool.batch({request: [1] * 5 for request in requests})  # slots are evicted and taken
    assert copies == [torch.int64, torch.int32]


def test_tensors_of_a_batch_share_no_memory(make_pool):
    """Compiled code guards the offset of a view, here that of sizes which are none of its own."""
    pool = make_pool(4)
    batch = pool.batch({pool.open(): [1, 2, 3], pool.open(): [4]})
    own = [getattr(batch, name) for name in FIELDS if name != "full_to_swa_index_mapping"]
    assert [t.untyped_storage().nbytes() for t in own] == [t.nbytes for t in own]
    pool_memory = {t.untyped_storage().data_ptr() for t in pool.buffers()}
    assert not pool_memory & {t.untyped_storage().data_ptr() for t in own}
