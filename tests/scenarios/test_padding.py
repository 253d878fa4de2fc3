"""Padded batches: padding reaches the sink and nothing else, and each length is its own value."""

import re

import numpy as np
import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

from .pools import Pools, values
from .reference import attend, store, translate, translate_pages
from .scenario import Counts, Scenario, scenario

LAYERS = 3


def each_layer(mapping, loc, k, caches):
    """The plain forward: every layer stores through its own translation."""
    for k_cache, v_cache in caches:
        store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
    return k.sum(-1)


def each_layer_in_numpy(mapping, loc, k, caches):
    for k_cache, v_cache in caches:
        store(k_cache, translate(mapping, loc), k)
        store(v_cache, translate(mapping, loc), -k)
    return k.sum(-1)


@scenario("A4", over=["none", "current", "stale", "idle"])
def test_each_store_uses_the_translation_of_its_own_locations(state):
    """A resolver takes the metadata's translation only if it is there and of the right length."""
    pools = Pools(full=300, swa=150)
    before, now = {"none": (0, 64), "current": (64, 64), "stale": (62, 64), "idle": (0, 0)}[state]
    inputs = {
        "mapping": pools.mapping(),
        "init_loc": None if state == "none" else pools.live(before, skip=now),
        "loc": pools.live(now),
        "k": values(now, 2, 4),
        "caches": pools.caches(LAYERS),
    }
    if state == "current":
        inputs["init_loc"] = inputs["loc"].clone()

    def forward(mapping, init_loc, loc, k, caches):
        metadata = None if init_loc is None else translate_loc(mapping, init_loc)
        for k_cache, v_cache in caches:
            fits = metadata is not None and metadata.shape[0] == loc.shape[0]
            store_kv(k_cache, v_cache, k, -k, metadata if fits else translate_loc(mapping, loc))
        return None if metadata is None else metadata * 2

    def reference(mapping, init_loc, loc, k, caches):
        each_layer_in_numpy(mapping, loc, k, caches)
        return None if init_loc is None else translate(mapping, init_loc) * 2

    found, values_ = {"none": (3, 1), "current": (1, 1), "stale": (4, 2), "idle": (1, 1)}[state]
    return Scenario(inputs, forward, reference, Counts(found, 1, values_, stores=(LAYERS, LAYERS)))


@scenario("A4")
def test_locations_of_62_and_64_tokens_are_two_values():
    """Stores made ahead of the padding and behind it, in one forward."""
    pools = Pools(full=300, swa=150)
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(62),
        "padded": pools.live(64, skip=62),
        "k": values(64, 2, 4),
        "caches": pools.caches(2),
    }

    def forward(mapping, loc, padded, k, caches):
        store_kv(*caches[0], k[:62], k[:62], translate_loc(mapping, loc))
        store_kv(*caches[1], k, k, translate_loc(mapping, padded))

    def reference(mapping, loc, padded, k, caches):
        for cache in caches[0]:
            store(cache, translate(mapping, loc), k[:62])
        for cache in caches[1]:
            store(cache, translate(mapping, padded), k)

    return Scenario(inputs, forward, reference, Counts(2, 1, 2, stores=(2, 2)))


@scenario("A5")
def test_padding_inside_the_forward_reaches_only_the_sink():
    """Data-parallel padding: `cat(loc, zeros)` between the attention's set-up and the stores."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(8, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def forward(mapping, loc, k, caches):
        set_up = translate_loc(mapping, loc)
        padded = torch.cat([loc, loc.new_zeros(3)])
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, padded))
        return set_up + 0

    def reference(mapping, loc, k, caches):
        padded = np.append(loc, [0, 0, 0])
        each_layer_in_numpy(mapping, padded, k, caches)
        return translate(mapping, loc)

    return Scenario(inputs, forward, reference, Counts(4, 1, 2, stores=(LAYERS, LAYERS)))


@scenario("A5")
def test_padding_between_calls_reaches_only_the_sink():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def pad(inputs):
        inputs["loc"] = torch.cat([pools.live(5, skip=9), torch.zeros(3, dtype=torch.int64)])
        inputs["k"] = values(8, 2, 4, seed=5)

    return Scenario(
        inputs,
        each_layer,
        each_layer_in_numpy,
        Counts(3, 1, 1, stores=(LAYERS, LAYERS)),
        then=[pad],
        graphs=2,
    )


@scenario("A7", "B01")
def test_a_stale_tail_of_a_bucket_touches_no_row():
    """8 lanes write rows 1 to 8, then 5 of them rows 9 to 13: rows 6 to 8 are as they were."""
    pools = Pools()
    mapping, ids = pools.mapping(), pools.live(13)
    mapping[ids] = torch.arange(1, 14)
    kept = {}
    inputs = {"mapping": mapping, "loc": ids[:8].clone(), "k": values(8, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def next_step(inputs):
        kept["rows"] = [cache[6:9].clone() for pair in inputs["caches"] for cache in pair]
        inputs["loc"][:5], inputs["loc"][5:] = ids[8:], 0
        inputs["k"][:5] = values(5, 2, 4, seed=2)  # the tail holds what the last step left

    def untouched(inputs, _):
        caches = [cache for pair in inputs["caches"] for cache in pair]
        for rows, cache in zip(kept.get("rows", caches), caches, strict=True):
            assert "rows" not in kept or torch.equal(rows, cache[6:9])

    return Scenario(
        inputs,
        each_layer,
        each_layer_in_numpy,
        Counts(3, 1, 1, stores=(LAYERS, LAYERS)),
        then=[next_step],
        check=untouched,
    )


@scenario("A16")
def test_late_layers_on_a_subset_of_rows_have_a_value_of_their_own():
    """The last layers see the last token of each request alone, at locations of their own."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(6),
        "tail_loc": pools.live(2, skip=10),
        "last": torch.tensor([2, 5]),
        "k": values(6, 2, 4),
        "caches": pools.caches(4),
    }

    def forward(mapping, loc, tail_loc, last, k, caches):
        for i, cache in enumerate(caches):
            if i == 2:
                k, loc = k[last], tail_loc
            store_kv(*cache, k, -k, translate_loc(mapping, loc))
        return k + 0

    def reference(mapping, loc, tail_loc, last, k, caches):
        each_layer_in_numpy(mapping, loc, k, caches[:2])
        each_layer_in_numpy(mapping, tail_loc, k[last], caches[2:])
        return k[last]

    return Scenario(inputs, forward, reference, Counts(4, 1, 2, stores=(4, 4)))


@scenario("A17", over=["constant", "symbolic"])
def test_two_halves_of_a_batch_are_slices_of_one_gather(split):
    """Two-batch overlap: the halves run through the layers interleaved."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(9), "k": values(9, 2, 4)}
    inputs |= {"half": 4, "caches": pools.caches(LAYERS)}

    def forward(mapping, loc, k, half, caches):
        for cache in caches:
            for part in (slice(None, half), slice(half, None)):
                store_kv(*cache, k[part], -k[part], translate_loc(mapping, loc[part]))

    def reference(mapping, loc, k, half, caches):
        each_layer_in_numpy(mapping, loc, k, caches)

    def other_split(inputs):
        inputs["half"], inputs["loc"] = 6, pools.live(9, skip=9)

    symbolic = split == "symbolic"
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(6, 1, 1, stores=(6, 6)),
        calls_of={"aten.index.Tensor": 1},
        then=[other_split] if symbolic else [],
        dynamic=True if symbolic else None,
    )


@scenario("A18")
def test_a_batch_narrowed_per_call_is_translated_once_and_sliced_at_the_use():
    """The padded batch is set up as a whole; attention and stores see the live part of it."""
    pools = Pools()
    live = 5
    loc = torch.cat([pools.live(live), torch.zeros(3, dtype=torch.int64)])
    table = pools.pages(8, 1)
    table[:live, 0], table[live:] = loc[:live], 0
    inputs = {
        "mapping": pools.mapping(),
        "loc": loc,
        "table": table,
        "k": values(8, 2, 4),
        "caches": pools.caches(LAYERS),
        "lengths": torch.tensor([1] * live + [0] * 3, dtype=torch.int32),
        "starts": torch.arange(live + 1, dtype=torch.int32),
    }

    def forward(mapping, loc, table, k, caches, lengths, starts):
        out = [translate_loc(mapping, loc) + 0]
        for cache in caches:
            store_kv(*cache, k[:live], -k[:live], translate_loc(mapping, loc[:live]))
            swa = translate_page_table(mapping, table[:live], 1).to(torch.int32)
            out.append(paged_attention(k[:live], *cache, swa, lengths[:live], starts))
        swa = translate_page_table(mapping, table, 1)
        return [*out, swa + 0]

    def reference(mapping, loc, table, k, caches, lengths, starts):
        each_layer_in_numpy(mapping, loc[:live], k[:live], caches)
        swa = translate_pages(mapping, table, 1)
        attended = [
            attend(k[:live], *cache, swa[:live], lengths[:live], starts) for cache in caches
        ]
        return [translate(mapping, loc), *attended, swa]

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(2 * LAYERS + 2, 1, 2, stores=(LAYERS, LAYERS)),
        calls_of={"aten.index.Tensor": 2, "cast:int32": 1},
    )


@scenario("A18")
def test_lanes_that_no_call_reads_may_hold_anything():
    """Only the live part is ever translated, so garbage behind it is nobody's business."""
    pools = Pools()
    loc = torch.cat([pools.live(5), torch.tensor([10**6, -7, 10**9])])
    inputs = {"mapping": pools.mapping(), "loc": loc, "k": values(8, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def forward(mapping, loc, k, caches):
        for cache in caches:
            store_kv(*cache, k[:5], -k[:5], translate_loc(mapping, loc[:5]))

    def reference(mapping, loc, k, caches):
        each_layer_in_numpy(mapping, loc[:5], k[:5], caches)

    def sliced_ahead_of_the_gather(graph):
        assert re.search(r"slice_\d+.*= torch\.ops\.aten\.slice\.Tensor\(\w+, 0, 0, 5\)", graph)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(3, 1, 1, stores=(LAYERS, LAYERS)),
        check_graph=sliced_ahead_of_the_gather,
    )


@scenario("B39")
def test_a_size_that_comes_back_uses_the_data_of_its_own_call():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(4), "k": values(4, 2, 4)}
    inputs["caches"] = pools.caches(LAYERS)

    def size(n, skip):
        def edit(inputs):
            inputs["loc"], inputs["k"] = pools.live(n, skip=skip), values(n, 2, 4, seed=skip)

        return edit

    return Scenario(
        inputs,
        each_layer,
        each_layer_in_numpy,
        Counts(3, 1, 1, stores=(LAYERS, LAYERS)),
        then=[size(8, 4), size(4, 12), size(8, 20)],
        graphs=2,
    )


@scenario("B49")
def test_sizes_8_2_1_0_and_64_run_one_graph():
    pools = Pools(full=300, swa=99)
    inputs = {"mapping": pools.mapping(), "caches": pools.caches(LAYERS)}

    def size(n):
        def edit(inputs):
            inputs["loc"], inputs["k"] = pools.live(n, skip=n % 7), values(n, 2, 4, seed=n)
            swa_compile.mark_sizes(inputs["loc"], inputs["k"])

        return edit

    size(8)(inputs)
    return Scenario(
        inputs,
        each_layer,
        each_layer_in_numpy,
        Counts(3, 1, 1, stores=(LAYERS, LAYERS)),
        then=[size(n) for n in (2, 1, 0, 64)],
    )
