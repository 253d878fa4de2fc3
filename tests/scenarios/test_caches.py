"""How caches and their new rows lie in memory, and the order in which they are read and written."""

import re

import pytest
import torch

from swa_compile.ops import store_kv, store_latent, translate_loc

from .pools import Pools, values
from .reference import read, store, translate
from .scenario import Counts, Scenario, compile_with, refused, scenario


@scenario("B22", inductor=True)
def test_k_and_v_in_halves_of_one_allocation_are_stored_without_a_copy():
    """Plain Inductor clones the whole allocation for a custom operator that writes both halves."""
    pools = Pools()
    rows = pools.rows
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(5),
        "k": values(5, 2, 4),
        "stacked_cache": values(2, rows, 2, 4, seed=11),
        "interleaved_cache": values(rows, 2, 2, 4, seed=12),
        "halves_cache": values(2 * rows, 2, 4, seed=13),
        "layers_cache": values(3, 2, rows, 2, 4, seed=14),
    }

    def pairs(stacked_cache, interleaved_cache, halves_cache, layers_cache):
        yield stacked_cache[0], stacked_cache[1]
        yield interleaved_cache[:, 0], interleaved_cache[:, 1]
        yield halves_cache[:rows], halves_cache[rows:]
        for layer in range(3):
            yield layers_cache[layer, 0], layers_cache[layer, 1]

    def forward(mapping, loc, k, **caches):
        for i, (k_cache, v_cache) in enumerate(pairs(**caches)):
            store_kv(k_cache, v_cache, k + i, k - i, translate_loc(mapping, loc))

    def reference(mapping, loc, k, **caches):
        for i, (k_cache, v_cache) in enumerate(pairs(**caches)):
            store(k_cache, translate(mapping, loc), k + i)
            store(v_cache, translate(mapping, loc), k - i)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(6, 1, 1, stores=(6, 6)),
        calls_of={"aten.index.Tensor": 1},
        sinks={
            "stacked_cache": (slice(None), 0),
            "halves_cache": [0, rows],
            "layers_cache": (slice(None), slice(None), 0),
        },
    )


@scenario("B28", inductor=True)
def test_rows_read_ahead_of_a_store_are_old_and_behind_it_new():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(2)

    def forward(mapping, loc, k, caches):
        seen = []
        for k_cache, v_cache in caches:
            slots = translate_loc(mapping, loc)
            seen.append(k_cache[slots] * 2)
            store_kv(k_cache, v_cache, k, k + 1, slots)
            seen.append(k_cache[translate_loc(mapping, loc)] * 2)
            store_kv(k_cache, v_cache, k + 2, -k, translate_loc(mapping, loc.flip(0)))
            seen.append(k_cache[translate_loc(mapping, loc)] * 2)
        return seen

    def reference(mapping, loc, k, caches):
        slots, seen = translate(mapping, loc), []
        for k_cache, v_cache in caches:
            seen.append(read(k_cache, slots) * 2)
            store(k_cache, slots, k)
            store(v_cache, slots, k + 1)
            seen.append(read(k_cache, slots) * 2)
            store(k_cache, slots[::-1], k + 2)
            store(v_cache, slots[::-1], -k)
            seen.append(read(k_cache, slots) * 2)
        return seen

    # Per layer three calls for the ids in order, and one for the ids turned round.
    return Scenario(inputs, forward, reference, Counts(8, 1, 2, stores=(4, 4)))


@scenario("B33")
def test_strides_of_rows_and_of_caches_are_respected():
    """V is the last third of a projection, K comes transposed, and both go to `kv[:, i]`."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(10)[::2],
        "qkv": values(5, 3 * 8),
        "caches": [values(pools.rows, 2, 2, 4, seed=i) for i in range(3)],
    }

    def forward(mapping, loc, qkv, caches):
        for i, cache in enumerate(caches):
            _, k, v = qkv.chunk(3, dim=-1)
            k, v = k.reshape(5, 4, 2).transpose(1, 2), v.view(5, 2, 4)
            store_kv(cache[:, 0], cache[:, 1], k + i, v, translate_loc(mapping, loc))

    def reference(mapping, loc, qkv, caches):
        slots = translate(mapping, loc)
        for i, cache in enumerate(caches):
            k = qkv[:, 8:16].reshape(5, 4, 2).transpose(0, 2, 1)
            store(cache[:, 0], slots, k + i)
            store(cache[:, 1], slots, qkv[:, 16:].reshape(5, 2, 4))

    return Scenario(inputs, forward, reference, Counts(3, 1, 1, stores=(3, 3)))


@scenario("B33")
def test_caches_that_lie_transposed_in_memory_get_the_same_rows():
    """Heads ahead of rows (`HND`): each row of the cache is scattered over the storage."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = [
        tuple(values(2, pools.rows, 4, seed=2 * i + j).transpose(0, 1) for j in range(2))
        for i in range(3)
    ]

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)

    return Scenario(inputs, forward, reference, Counts(3, 1, 1, stores=(3, 3)))


@scenario("B23")
def test_values_and_scales_of_two_dtypes_in_one_row_are_written_where_each_has_its_tensor():
    """Two tensors, one dtype each: the form that the refusal of a shared buffer recommends."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(5),
        "x": values(5, 16).round(),
        "value_caches": [pools.cache(i, 16).round().to(torch.float8_e4m3fn) for i in range(2)],
        "scale_caches": [pools.cache(i, 4).to(torch.bfloat16) for i in range(2)],
    }

    def forward(mapping, loc, x, value_caches, scale_caches):
        for i in range(2):
            store_latent(value_caches[i], x, translate_loc(mapping, loc))
            store_latent(scale_caches[i], x[:, :4] * 2, translate_loc(mapping, loc))

    def reference(mapping, loc, x, value_caches, scale_caches):
        slots = translate(mapping, loc)
        for i in range(2):
            store(value_caches[i], slots, x)
            store(scale_caches[i], slots, x[:, :4] * 2)

    def two_dtypes(graph):
        assert len(re.findall(r"= torch\.ops\.aten\.index_put\.default\(", graph)) == 4

    return Scenario(
        inputs, forward, reference, Counts(4, 1, 1, stores=(4, 4)), check_graph=two_dtypes
    )


@pytest.mark.inductor
@pytest.mark.parametrize("engine", ["eager", "swa"])
def test_a_row_past_2_to_the_31_bytes_is_written_at_its_place(engine):
    """Slot 3,273,680 of 656 bytes: an offset of 32 bits is negative there. Row B03."""
    slot, width = 3_273_680, 656
    # Virtual memory, of which a few pages are touched.
    cache = torch.empty(slot + 3, width, dtype=torch.uint8)
    wrapped = (slot * width - 2**31) // width
    watched = [0, wrapped, wrapped + 1, slot - 1, slot + 1, slot + 2]
    cache[watched] = 7
    mapping = torch.zeros(slot + 103, dtype=torch.int64)
    mapping[slot + 100], mapping[-1] = slot, -1
    row = (torch.arange(width) % 251).to(torch.uint8)[None]

    def forward(mapping, loc, row, cache):
        store_latent(cache, row, translate_loc(mapping, loc))

    torch._dynamo.reset()
    with torch.no_grad():
        compile_with(engine, forward)(mapping, torch.tensor([slot + 100]), row, cache)
    assert torch.equal(cache[slot], row[0])
    assert all(bool((cache[i] == 7).all()) for i in watched)


@pytest.mark.parametrize("engine", ["swa_eager"])
def test_inputs_that_interleave_two_dtypes_in_one_storage_are_a_named_error(engine):
    """Float8 values and bfloat16 scales of a row, handed in as two views: torch refuses. B23."""
    pools = Pools()
    buffer_cache = torch.zeros(pools.rows, 24, dtype=torch.uint8)
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "x": values(5, 16)}
    inputs["value_cache"] = buffer_cache[:, :16].view(torch.float8_e4m3fn)
    inputs["scale_cache"] = buffer_cache[:, 16:].view(torch.bfloat16)

    def forward(mapping, loc, x, value_cache, scale_cache):
        store_latent(value_cache, x, translate_loc(mapping, loc))
        store_latent(scale_cache, x[:, :4], translate_loc(mapping, loc))

    refused(engine, forward, inputs, "input mutations on views with different dtypes")
    assert not buffer_cache.any()


@scenario("A1", "B49")
def test_caches_of_symbolic_sizes_are_fed_by_one_buffer_all_the_same():
    """`dynamic=True`: torch gives equal sizes of a pool one symbol, so one check serves them."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(3)

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)

    def one_buffer(graph):
        fed_by = set(re.findall(r"index_put\.default\(\w+, \[(\w+)\]", graph))
        assert len(fed_by) == 1, f"the stores are fed by {fed_by}"

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(3, 1, 1, stores=(3, 3)),
        calls_of={"aten.index.Tensor": 1, "swa.check_ids.default": 2},
        check_graph=one_buffer,
        dynamic=True,
    )
