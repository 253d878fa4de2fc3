"""More index spaces than two: compressed slots, unified pools, and slots without any mapping."""

import re

import numpy as np
import torch

from swa_compile.ops import store_kv, store_latent, translate_loc, translate_paged_loc

from .pools import Pools, values
from .reference import each, read, store, translate, translate_paged
from .scenario import Counts, Scenario, scenario

LAYERS = 2


def compressed(loc, where):
    """The slot of the group of four that token `loc` completes, 0 for any other token."""
    return where((loc + 1) % 4 == 0, loc // 4, 0)


@scenario("A14", inductor=True)
def test_compressed_slots_go_through_a_mapping_of_their_own():
    """HiSparse: compressed groups lie in a small device pool; the compressor wants int64 slots,
    the kernel that reads them int32."""
    pools, rows = Pools(), 12
    loc = pools.live(30)
    groups = loc[(loc + 1) % 4 == 0] // 4
    assert 4 < len(groups) < rows and int(groups.min()) > rows
    device_mapping = torch.zeros(pools.full_rows // 4 + 2, dtype=torch.int64)
    device_mapping[groups] = torch.arange(1, len(groups) + 1).flip(0)
    device_mapping[-1] = -1
    inputs = {
        "mapping": pools.mapping(),
        "device_mapping": device_mapping,
        "loc": loc,
        "x": values(30, 8),
        "caches": [pools.cache(i, 8) for i in range(LAYERS)],
        "compressed_caches": [values(rows, 8, seed=50 + i) for i in range(LAYERS)],
    }

    def forward(mapping, device_mapping, loc, x, caches, compressed_caches):
        seen = []
        for i in range(LAYERS):
            store_latent(caches[i], x + i, translate_loc(mapping, loc))
            slots = translate_loc(device_mapping, compressed(loc, torch.where))
            store_latent(compressed_caches[i], x - i, slots)
            slots = translate_loc(device_mapping, compressed(loc, torch.where)).to(torch.int32)
            # The sink is read by nobody.
            seen.append(torch.where((slots > 0)[:, None], compressed_caches[i][slots], 0.0))
        return seen

    def reference(mapping, device_mapping, loc, x, caches, compressed_caches):
        seen = []
        slots = each(lambda t: device_mapping[t // 4] if (t + 1) % 4 == 0 else 0, loc)
        for i in range(LAYERS):
            store(caches[i], translate(mapping, loc), x + i)
            store(compressed_caches[i], slots, x - i)
            seen.append(read(compressed_caches[i], np.where(slots > 0, slots, -1)))
        return seen

    # Gathers: both mappings, and the rows read in each layer.
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(3 * LAYERS, 1, 2, stores=(2 * LAYERS, 2 * LAYERS)),
        calls_of={"aten.index.Tensor": 2 + LAYERS, "cast:int32": 1},
    )


@scenario("A15")
def test_compressor_slots_are_invariants_and_no_translations():
    """DSV4's C4 and C128: `c4_out_loc` and `c128_out_loc` come from the full ids by arithmetic."""
    pools = Pools(full=600, swa=47)
    mapping = pools.mapping()
    loc = torch.tensor([255, 511, 130, 131, 259, 300])
    mapping[loc] = torch.arange(7, 13)
    ratios = (4, 128)
    inputs = {
        "mapping": mapping,
        "loc": loc,
        "x": values(6, 8),
        "caches": [pools.cache(i, 8) for i in range(LAYERS)],
        "c4_caches": [values(600 // 4 + 1, 8, seed=60 + i) for i in range(LAYERS)],
        "c128_caches": [values(600 // 128 + 1, 8, seed=70 + i) for i in range(LAYERS)],
    }

    def forward(mapping, loc, x, caches, c4_caches, c128_caches):
        for i in range(LAYERS):
            x = x + 1
            store_latent(caches[i], x, translate_loc(mapping, loc))
            for ratio, own in zip(ratios, (c4_caches[i], c128_caches[i]), strict=True):
                slots = torch.where((loc + 1) % ratio == 0, loc // ratio, 0)
                store_latent(own, x * 2, slots)
        return x

    def reference(mapping, loc, x, caches, c4_caches, c128_caches):
        for i in range(LAYERS):
            x = x + 1
            store(caches[i], translate(mapping, loc), x)
            for ratio, own in zip(ratios, (c4_caches[i], c128_caches[i]), strict=True):
                slots = each(lambda t, r=ratio: t // r if (t + 1) % r == 0 else 0, loc)
                store(own, slots, x * 2)
        return x

    def in_the_prologue(graph):
        first_store = graph.index("aten.index_put.default")
        # One of the three `where` keeps "none" out of the mapping.
        for op, wanted in (("remainder.Scalar", 2), ("floor_divide.default", 2), ("where.self", 3)):
            places = [m.start() for m in re.finditer(rf"= torch\.ops\.aten\.{op}\(", graph)]
            assert len(places) == wanted and max(places) < first_store, op

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(LAYERS, 1, 1, stores=(3 * LAYERS, 3 * LAYERS)),
        calls_of={"aten.index.Tensor": 1, "aten.remainder.Scalar": 2},
        check_graph=in_the_prologue,
    )


@scenario("A19", over=[1, 16])
def test_a_unified_pool_is_translated_by_pages_and_its_tombstones_go_to_the_sink(page):
    pools = Pools(full=90, swa=20, page=page)
    table = torch.full((91,), -1)
    table[pools.live_pages] = torch.from_numpy(pools.swa_pages)
    table[0] = 0
    none = torch.tensor([int(pools.evicted_pages[0]) * page, -1, 90 * page + page, 10**7])
    loc = torch.cat([pools.live(6), none, pools.live(3, skip=9)])
    inputs = {"table": table, "loc": loc, "k": values(13, 2, 4), "caches": pools.caches(LAYERS)}

    def forward(table, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_paged_loc(table, loc, page))
        return translate_paged_loc(table, loc, page).to(torch.int32)

    def reference(table, loc, k, caches):
        slots = translate_paged(table, loc, page)
        for k_cache, v_cache in caches:
            store(k_cache, slots, k)
            store(v_cache, slots, -k)
        return slots.astype(np.int32)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(LAYERS + 1, 1, 1, stores=(LAYERS, LAYERS)),
        calls_of={"aten.index.Tensor": 1, "cast:int32": 1},
    )


@scenario("A19")
def test_a_page_table_of_a_unified_pool_ahead_of_a_token_mapping_is_a_node_of_its_own():
    """Virtual ids to full ids by pages, those to SWA ids by tokens: two kinds, never mixed up."""
    page = 4
    pools = Pools(full=120, swa=30, page=page)
    table = torch.full((40,), -1)
    table[20:32] = torch.from_numpy(pools.live_pages[:12])
    loc = torch.cat([torch.arange(20 * page, 20 * page + 7), torch.tensor([39 * page, 5, 100])])
    inputs = {"table": table, "mapping": pools.mapping(), "loc": loc, "k": values(10, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def forward(table, mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            full = translate_paged_loc(table, loc, page)
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, full))

    def reference(table, mapping, loc, k, caches):
        slots = translate(mapping, translate_paged(table, loc, page))
        for k_cache, v_cache in caches:
            store(k_cache, slots, k)
            store(v_cache, slots, -k)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(2 * LAYERS, 2, 2, stores=(LAYERS, LAYERS)),
        calls_of={"aten.index.Tensor": 2},
    )


@scenario("A19")
def test_a_table_and_a_mapping_of_one_tensor_are_two_values():
    """The same tensor read by pages and by tokens: equal operands, another kind."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(2)

    def forward(mapping, loc, k, caches):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))
        store_kv(*caches[1], k, k, translate_paged_loc(mapping, loc // 16, 1))

    def reference(mapping, loc, k, caches):
        for cache in caches[0]:
            store(cache, translate(mapping, loc), k)
        for cache in caches[1]:
            store(cache, translate_paged(mapping, loc // 16, 1), k)

    return Scenario(inputs, forward, reference, Counts(2, 1, 2, stores=(2, 2)))
