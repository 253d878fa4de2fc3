"""Reads: page tables of any shape are translated once, beside the write locations."""

import re

import numpy as np
import torch

from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

from .pools import Pools, values
from .reference import attend, each, read, store, translate, translate_pages
from .scenario import Counts, Scenario, scenario

LAYERS = 3


@scenario("A3", over=[1, 16, 64])
def test_tables_and_locations_share_one_node_and_one_cast(page):
    """The page table is read off `req_to_token` in every layer, translated and cast to int32."""
    pools = Pools(full=24, swa=6, page=page) if page > 1 else Pools()
    width = 3
    lengths = torch.tensor([2 * page + 1, page], dtype=torch.int32)
    tables = pools.pages(2, width)
    req_to_token = torch.zeros(5, width * page, dtype=torch.int32)
    rows = torch.tensor([3, 1])
    slots = tables[:, :, None] * page + torch.arange(page, dtype=torch.int32)
    req_to_token[rows] = slots.flatten(1).to(torch.int32)
    # Each request decodes one token, its last.
    loc = req_to_token[rows, lengths.long() - 1].long()
    inputs = {
        "mapping": pools.mapping(),
        "req_to_token": req_to_token,
        "requests": rows,
        "loc": loc,
        "seq_lens": lengths,
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "q": values(2, 4, 4),
        "k": values(2, 2, 4, seed=3),
        "caches": pools.caches(LAYERS),
    }

    def forward(mapping, req_to_token, requests, loc, seq_lens, cu_seqlens_q, q, k, caches):
        out = []
        for i, (k_cache, v_cache) in enumerate(caches):
            store_kv(k_cache, v_cache, k + i, k, translate_loc(mapping, loc))
            table = req_to_token[requests][:, ::page] // page
            table = translate_page_table(mapping, table, page).to(torch.int32)
            out.append(
                paged_attention(
                    q, k_cache, v_cache, table, seq_lens, cu_seqlens_q, page_size=page, window=5
                )
            )
        return out

    def reference(mapping, req_to_token, requests, loc, seq_lens, cu_seqlens_q, q, k, caches):
        table = translate_pages(mapping, req_to_token[requests][:, ::page] // page, page)
        out = []
        for i, (k_cache, v_cache) in enumerate(caches):
            store(k_cache, translate(mapping, loc), k + i)
            store(v_cache, translate(mapping, loc), k)
            out.append(
                attend(q, k_cache, v_cache, table, seq_lens, cu_seqlens_q, page_size=page, window=5)
            )
        return out

    # Gathers: the rows of req_to_token, the locations, the table.
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=2 * LAYERS, nodes=1, values=2, stores=(LAYERS, LAYERS)),
        calls_of={"aten.index.Tensor": 3, "cast:int32": 1, "swa.paged_attention.default": LAYERS},
    )


@scenario("A10", "B08")
def test_the_two_read_tables_of_a_verify_step_are_in_one_node():
    """EAGLE with top-k > 1: the prefix `[B, P]` and the drafts `[B, topk, P]`, int32, -1 padded."""
    pools = Pools()
    prefix, expand = pools.pages(2, 5), pools.pages(2, 3, 4, skip=12)
    prefix[1, 3:] = -1
    expand[0, 1, 2:] = -1
    inputs = {"mapping": pools.mapping(), "prefix": prefix, "expand": expand}
    inputs["caches"] = [pools.cache(i) for i in range(LAYERS)]

    def read_rows(cache, slots):
        return torch.where((slots >= 0)[..., None, None], cache[slots.clamp(min=0)], 0.0)

    def forward(mapping, prefix, expand, caches):
        out = []
        for cache in caches:
            out.append(read_rows(cache, translate_page_table(mapping, prefix, 1)))
            out.append(read_rows(cache, translate_page_table(mapping, expand, 1)))
        return out

    def reference(mapping, prefix, expand, caches):
        slots = [translate(mapping, table) for table in (prefix, expand)]
        return [read(cache, ids) for cache in caches for ids in slots]

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=2 * LAYERS, nodes=1, values=2),
        calls_of={"aten.index.Tensor": 2 + 2 * LAYERS},
    )


@scenario("B08")
def test_a_table_and_its_reshapes_are_one_value():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "table": pools.pages(2, 3, 4)}

    def forward(mapping, table):
        flat = translate_loc(mapping, table.flatten())
        tall = translate_loc(mapping, table.view(6, 4))
        turned = translate_loc(mapping, table.transpose(0, 2))
        return flat + 0, tall + 0, turned + 0, translate_loc(mapping, table) + 0

    def reference(mapping, table):
        slots = translate(mapping, table)
        return slots.ravel(), slots.reshape(6, 4), slots.transpose(2, 1, 0), slots

    return Scenario(inputs, forward, reference, Counts(4, 1, 1), calls_of={"aten.index.Tensor": 1})


@scenario("A24")
def test_tables_per_chunk_are_taken_from_one_translated_table():
    """Llama 4: attention looks at chunks of the context, each a request of its own."""
    page = 4
    pools = Pools(full=40, swa=12, page=page)
    inputs = {
        "mapping": pools.mapping(),
        "table": pools.pages(2, 6),
        "of_request": torch.tensor([0, 0, 0, 1, 1]),
        "columns": torch.tensor([[0, 1], [2, 3], [4, 5], [1, 2], [3, 4]]),
        "caches": [pools.cache(i) for i in range(LAYERS)],
    }

    def forward(mapping, table, of_request, columns, caches):
        out = []
        for cache in caches:
            translated = translate_page_table(mapping, table, page)
            local = translated[of_request[:, None], columns].to(torch.int32)
            out.append(cache[local * page + 1])
        return out

    def reference(mapping, table, of_request, columns, caches):
        local = np.empty((5, 2), np.int64)
        for chunk, column in np.ndindex(local.shape):
            full = table[of_request[chunk], columns[chunk, column]]
            local[chunk, column] = mapping[full * page] // page
        return [read(cache, local * page + 1) for cache in caches]

    # Gathers: the mapping, the chunks' tables, and K in each layer.
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=LAYERS, nodes=1, values=1),
        calls_of={"aten.index.Tensor": 2 + LAYERS, "cast:int32": 1},
    )


@scenario("A20")
def test_an_identity_mapping_gives_a_fresh_tensor_and_never_the_ids():
    """Every layer slides: the mapping is the identity, the ids' buffer stays the engine's own."""
    mapping = torch.cat([torch.arange(64), torch.tensor([-1])])
    inputs = {"mapping": mapping, "loc": torch.tensor([60, 3, -1, 59])}

    def forward(mapping, loc):
        return translate_loc(mapping, loc), translate_loc(mapping, loc)

    def reference(mapping, loc):
        return loc, loc

    def apart(inputs, outputs):
        want = inputs["loc"].tolist()
        outputs[0].fill_(7)
        assert inputs["loc"].tolist() == want and outputs[1].tolist() == want
        assert int(inputs["mapping"][60]) == 60

    return Scenario(inputs, forward, reference, Counts(2, 1, 1), check=apart)


@scenario("A21")
def test_ring_pools_are_hoisted_as_invariants():
    """Request windows in rings of their own: `slot * ring + position % ring`, without a mapping."""
    ring = 8
    caches = [
        (values(6 * ring, 2, 4, seed=i), values(6 * ring, 2, 4, seed=i + 9)) for i in range(LAYERS)
    ]
    inputs = {
        "request": torch.tensor([4, 1, 5, 2]),
        "positions": torch.tensor([100, 7, 64, 13]),
        "k": values(4, 2, 4),
        "caches": caches,
    }

    def forward(request, positions, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k + 1, request * ring + positions % ring)

    def reference(request, positions, k, caches):
        slots = each(lambda i: request[i] * ring + positions[i] % ring, np.arange(4))
        for k_cache, v_cache in caches:
            store(k_cache, slots, k)
            store(v_cache, slots, k + 1)

    def in_the_prologue(graph):
        first_store = graph.index("aten.index_put.default")
        assert max(m.start() for m in re.finditer(r"aten\.remainder", graph)) < first_store

    # Per layer a product, a remainder, a sum; then the check and the clamp of its store.
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(0, 0, 0, stores=(LAYERS, LAYERS), invariants=5 * LAYERS),
        calls_of={"aten.mul.Tensor": 1, "aten.remainder.Scalar": 1},
        check_graph=in_the_prologue,
    )
