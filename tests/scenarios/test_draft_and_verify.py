"""Speculative decoding and context parallelism: who reads which part of which locations."""

import re

import numpy as np
import pytest
import torch

from swa_compile.ops import store_kv, translate_loc

from .pools import Pools, values
from .reference import read, store, translate
from .scenario import Counts, Scenario, refused, scenario

LAYERS = 3
TOPK, STEPS = 2, 4


def step_locations(loc, i):
    """Draft step `i` of `[bs * topk * steps]` locations: strided, and no prefix of them."""
    return loc.reshape(-1, TOPK, STEPS).permute(2, 0, 1).reshape(STEPS, -1)[i]


def drafts(mapping, loc, k, caches):
    """All draft steps of one forward."""
    for i in range(STEPS):
        k = k + 1
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, step_locations(loc, i)))
    return k


def drafts_in_numpy(mapping, loc, k, caches):
    requests = len(loc) // (TOPK * STEPS)
    for i in range(STEPS):
        k = k + 1
        ids = [loc[(b * TOPK + t) * STEPS + i] for b in range(requests) for t in range(TOPK)]
        slots = translate(mapping, np.array(ids))
        for k_cache, v_cache in caches:
            store(k_cache, slots, k)
            store(v_cache, slots, -k)
    return k


@scenario("A8", inductor=True)
def test_all_draft_steps_take_their_rows_from_one_gather():
    """EAGLE's multi-step draft decode: each step permutes and reshapes the locations anew."""
    pools, requests = Pools(), 3
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(requests * TOPK * STEPS),
        "k": values(requests * TOPK, 2, 4),
        "caches": pools.caches(2),
    }
    return Scenario(
        inputs,
        drafts,
        drafts_in_numpy,
        Counts(2 * STEPS, 1, 1, stores=(2 * STEPS, 2 * STEPS)),
        calls_of={"aten.index.Tensor": 1},
    )


@scenario("A8")
def test_draft_steps_of_any_number_of_requests_run_one_graph():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "caches": pools.caches(2)}

    def requests(count, skip):
        def edit(inputs):
            inputs["loc"] = pools.live(count * TOPK * STEPS, skip=skip)
            inputs["k"] = values(count * TOPK, 2, 4, seed=count)

        return edit

    requests(3, 0)(inputs)
    return Scenario(
        inputs,
        drafts,
        drafts_in_numpy,
        Counts(2 * STEPS, 1, 1, stores=(2 * STEPS, 2 * STEPS)),
        calls_of={"aten.index.Tensor": 1},
        then=[requests(5, 5), requests(2, 9)],
        dynamic=True,
    )


@scenario("A8")
def test_one_draft_step_translates_its_own_lanes_alone():
    """The other steps' lanes are not read, and may hold anything."""
    pools, requests = Pools(), 3
    loc = torch.full((requests, TOPK, STEPS), 10**6)
    loc[:, :, 2] = pools.live(requests * TOPK).view(requests, TOPK)
    inputs = {"mapping": pools.mapping(), "loc": loc.ravel(), "k": values(requests * TOPK, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, step_locations(loc, 2)))

    def reference(mapping, loc, k, caches):
        slots = translate(mapping, loc.reshape(-1, STEPS)[:, 2])
        for k_cache, v_cache in caches:
            store(k_cache, slots, k)
            store(v_cache, slots, -k)

    return Scenario(inputs, forward, reference, Counts(3, 1, 1, stores=(LAYERS, LAYERS)))


def draft_model(depth):
    """One of the small models of multi-layer EAGLE."""

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches[depth : 2 * depth + 1]:
            k = k + depth
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
        return k

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches[depth : 2 * depth + 1]:
            k = k + depth
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)
        return k

    return forward, reference


@scenario("A11")
def test_small_models_over_one_mapping_keep_no_state_between_them():
    """Multi-layer EAGLE: model after model, then all of them again over an edited mapping."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(6), "k": values(6, 2, 4)}
    inputs["caches"] = pools.caches(5)
    depths = (0, 1, 2)
    forwards, references = zip(*map(draft_model, depths), strict=True)

    def next_round(inputs):
        inputs["mapping"][inputs["loc"]] = torch.arange(11, 17)

    def again(inputs):
        inputs["k"] = inputs["k"] + 1

    return Scenario(
        inputs,
        forwards,
        references,
        [Counts(d + 1, 1, 1, stores=(d + 1, d + 1)) for d in depths],
        then=[again, again, next_round, again, again],
        graphs=3,
    )


@scenario("A13", over=["input", "part"])
def test_stores_use_the_global_locations_and_queries_the_local_ones(local):
    """Context parallelism: every rank stores all tokens, and queries with its own alone."""
    pools, ranks, rank = Pools(), 2, 1
    loc = pools.live(8)
    inputs = {
        "mapping": pools.mapping(),
        "loc": loc,
        "local_loc": loc[rank::ranks].clone(),
        "k": values(8, 2, 4),
        "caches": pools.caches(LAYERS),
    }

    def forward(mapping, loc, local_loc, k, caches):
        if local == "part":
            local_loc = loc.view(-1, ranks)[:, rank]
        seen = []
        for i, (k_cache, v_cache) in enumerate(caches):
            store_kv(k_cache, v_cache, k + i, k, translate_loc(mapping, loc))
            seen.append(k_cache[translate_loc(mapping, local_loc)] * 2)
        return seen

    def reference(mapping, loc, local_loc, k, caches):
        slots, local_slots = translate(mapping, loc), translate(mapping, local_loc)
        seen = []
        for i, (k_cache, v_cache) in enumerate(caches):
            store(k_cache, slots, k + i)
            store(v_cache, slots, k)
            seen.append(read(k_cache, local_slots) * 2)
        return seen

    def one_buffer_of_8(graph):
        (slots,) = set(re.findall(r"index_put\.default\(\w+, \[(\w+)\]", graph))
        assert re.search(rf'\b{slots}: "i64\[8\]', graph)

    # A part of what is translated as a whole is taken from there.
    values_ = {"input": 2, "part": 1}[local]
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(2 * LAYERS, 1, values_, stores=(LAYERS, LAYERS)),
        calls_of={"aten.index.Tensor": values_ + LAYERS},
        check_graph=one_buffer_of_8,
    )


@pytest.mark.parametrize("engine", ["eager", "swa_eager"])
def test_local_locations_in_a_store_of_all_tokens_are_refused(engine):
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(8), "k": values(8, 2, 4)}
    inputs["caches"] = pools.caches(1)

    def forward(mapping, loc, k, caches):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc[1::2]))

    refused(engine, forward, inputs, "store_kv", "got 4 ids for 8 rows")
