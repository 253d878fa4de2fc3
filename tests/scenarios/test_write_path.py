"""Stores: every SWA layer translates the forward's locations, and they are translated once."""

import re

import numpy as np
import torch

from swa_compile.ops import store_kv, store_latent, translate_loc

from .pools import Pools, values
from .reference import store, translate
from .scenario import Counts, Scenario, scenario


def norm_rope(x, positions, xp):
    """RMS norm and rotation of each row of `x`, in torch or NumPy (`xp`)."""
    x = x * (x * x).mean(-1)[:, None] ** -0.5
    half = x.shape[1] // 2
    angle = positions[:, None] * 100.0 ** (-xp.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    cos, sin = xp.cos(angle), xp.sin(angle)
    return a * cos - b * sin, b * cos + a * sin


@scenario("A1", inductor=True)
def test_five_store_sites_share_one_gather_and_one_cast():
    """Two fused norm + RoPE + store sites, a compressed store, two plain ones; int32 locations."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(6),
        "positions": torch.tensor([5, 9, 0, 3, 8, 2]),
        "x": values(6, 16),
        "caches": [pools.cache(i, size) for i, size in enumerate((16, 16, 8, 16, 16))],
    }

    def forward(mapping, loc, positions, x, caches):
        store_latent(
            caches[0],
            torch.cat(norm_rope(x, positions, torch), -1),
            translate_loc(mapping, loc).to(torch.int32),
        )
        store_latent(
            caches[1],
            torch.cat(norm_rope(x + 1, positions, torch), -1),
            translate_loc(mapping, loc).to(torch.int32),
        )
        pooled = x[:, :8] + x[:, 8:]
        store_latent(caches[2], pooled, translate_loc(mapping, loc).to(torch.int32))
        for cache in caches[3:]:
            store_latent(cache, x, translate_loc(mapping, loc).to(torch.int32))

    def reference(mapping, loc, positions, x, caches):
        slots = translate(mapping, loc)
        store(caches[0], slots, np.concatenate(norm_rope(x, positions, np), -1))
        store(caches[1], slots, np.concatenate(norm_rope(x + 1, positions, np), -1))
        store(caches[2], slots, x[:, :8] + x[:, 8:])
        store(caches[3], slots, x)
        store(caches[4], slots, x)

    def one_buffer(graph):
        fed_by = set(re.findall(r"index_put\.default\(\w+, \[(\w+)\]", graph))
        assert len(fed_by) == 1, f"the stores are fed by {fed_by}"

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=5, nodes=1, values=1, stores=(5, 5)),
        calls_of={"aten.index.Tensor": 1, "cast:int32": 1},
        check_graph=one_buffer,
        atol=1e-5,
    )


@scenario("A2", "B05")
def test_46_sliding_layers_translate_once_and_full_layers_never():
    """SGLang's SWAKVPool: full layers store at out_cache_loc, the others at its translation."""
    pools = Pools()
    full = (17, 35)
    caches = [
        tuple((pools.full_cache if i in full else pools.cache)(2 * i + j) for j in range(2))
        for i in range(48)
    ]
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = caches

    def forward(mapping, loc, k, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            k = k + 1
            store_kv(k_cache, v_cache, k, -k, loc if i in full else translate_loc(mapping, loc))

    def reference(mapping, loc, k, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            k = k + 1
            slots = loc if i in full else translate(mapping, loc)
            store(k_cache, slots, k)
            store(v_cache, slots, -k)

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=46, nodes=1, values=1, stores=(48, 48)),
        calls_of={"aten.index.Tensor": 1},
    )


@scenario("A9")
def test_a_forward_without_metadata_object_is_hoisted_all_the_same():
    """A draft-extend runner: no metadata is ever made, the layers get tensors alone."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(7), "k": values(7, 2, 4)}
    inputs["caches"] = pools.caches(3)

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k * 2, translate_loc(mapping, loc))
        return k.sum(-1)

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), k * 2)
        return k.sum(-1)

    return Scenario(inputs, forward, reference, Counts(3, 1, 1, stores=(3, 3)))


@scenario("A22")
def test_cross_attention_stores_are_left_untranslated():
    """The encoder's keys lie in the full pool, at the encoder's own locations."""
    pools = Pools()
    inputs = {
        "mapping": pools.mapping(),
        "loc": pools.live(4),
        "encoder_loc": pools.live(6, skip=20),
        "k": values(4, 2, 4),
        "encoded": values(6, 2, 4, seed=2),
        "caches": pools.caches(3),
        "cross_caches": [(pools.full_cache(i), pools.full_cache(i + 9)) for i in range(3)],
    }

    def forward(mapping, loc, encoder_loc, k, encoded, caches, cross_caches):
        for i in range(3):
            store_kv(*caches[i], k, k, translate_loc(mapping, loc))
            store_kv(*cross_caches[i], encoded + i, encoded, encoder_loc)

    def reference(mapping, loc, encoder_loc, k, encoded, caches, cross_caches):
        for i in range(3):
            store(caches[i][0], translate(mapping, loc), k)
            store(caches[i][1], translate(mapping, loc), k)
            store(cross_caches[i][0], encoder_loc, encoded + i)
            store(cross_caches[i][1], encoder_loc, encoded)

    def only_loc(graph):
        (gather,) = re.findall(r"aten\.index\.Tensor\((\w+), ", graph)
        assert "encoder" not in gather

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(3, 1, 1, stores=(6, 6)),
        calls_of={"aten.index.Tensor": 1},
        check_graph=only_loc,
    )


@scenario("A23")
def test_rows_just_written_are_read_back_through_the_same_buffer():
    """Deterministic extend: the keys of this forward are attended to from the cache."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(3)

    def forward(mapping, loc, k, caches):
        seen = []
        for i, (k_cache, v_cache) in enumerate(caches):
            store_kv(k_cache, v_cache, k + i, k - i, translate_loc(mapping, loc))
            slots = translate_loc(mapping, loc)
            seen.append(k_cache[slots] * 2 + v_cache[slots])
        return seen

    def reference(mapping, loc, k, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            store(k_cache, translate(mapping, loc), k + i)
            store(v_cache, translate(mapping, loc), k - i)
        return [(k + i) * 2 + (k - i) for i in range(3)]

    # The mapping is gathered from once; the other gathers read K and V.
    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=6, nodes=1, values=1, stores=(3, 3)),
        calls_of={"aten.index.Tensor": 1 + 6},
    )


@scenario("B02", "A25")
def test_int32_and_int64_consumers_share_one_gather_and_one_cast():
    """Attention tables are int32, write locations and Triton's window indices int64."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = pools.caches(1)

    def forward(mapping, loc, k, caches):
        table = translate_loc(mapping, loc).to(torch.int32)
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))
        window = translate_loc(mapping, loc).to(torch.int32)
        return table * 2, window + 1, translate_loc(mapping, loc) + 0

    def reference(mapping, loc, k, caches):
        slots = translate(mapping, loc)
        store(caches[0][0], slots, k)
        store(caches[0][1], slots, k)
        return (slots * 2).astype(np.int32), (slots + 1).astype(np.int32), slots

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(found=4, nodes=1, values=1, stores=(1, 1)),
        calls_of={"aten.index.Tensor": 1, "cast:int32": 1},
    )


@scenario("B13")
def test_kinds_heads_and_dims_may_differ_from_layer_to_layer():
    pools = Pools()
    shapes = [("swa", 1, 8, 8), ("full", 4, 2, 6), ("swa", 2, 6, 4), ("swa", 1, 3, 5)]
    caches = []
    for i, (kind, heads, k_dim, v_dim) in enumerate(shapes):
        make = pools.cache if kind == "swa" else pools.full_cache
        caches.append((make(2 * i, heads, k_dim), make(2 * i + 1, heads, v_dim)))
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "x": values(5, 8)}
    inputs["caches"] = caches

    def rows(x, i):
        _, heads, k_dim, v_dim = shapes[i]
        k, v = x[:, : heads * k_dim] + i, x[:, : heads * v_dim] - i
        return k.reshape(5, heads, k_dim), v.reshape(5, heads, v_dim)

    def forward(mapping, loc, x, caches):
        x = torch.cat([x, x, x], -1)
        for i, cache in enumerate(caches):
            swa = shapes[i][0] == "swa"
            store_kv(*cache, *rows(x, i), translate_loc(mapping, loc) if swa else loc)

    def reference(mapping, loc, x, caches):
        x = np.concatenate([x, x, x], -1)
        for i, cache in enumerate(caches):
            slots = translate(mapping, loc) if shapes[i][0] == "swa" else loc
            for one, new in zip(cache, rows(x, i), strict=True):
                store(one, slots, new)

    return Scenario(inputs, forward, reference, Counts(3, 1, 1, stores=(4, 4)))


@scenario("B18")
def test_a_pipeline_stage_stores_into_its_own_layers():
    """Stage 2 holds layers 3 to 5 of the model in caches 0 to 2: one graph serves every stage."""
    pools = Pools()
    stages = [pools.caches(6)[:3], pools.caches(6)[3:]]
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs["caches"] = stages[0]

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            k = k + 1
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
        return k

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            k = k + 1
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)
        return k

    def next_stage(inputs):
        inputs["caches"], inputs["k"] = stages[1], inputs["k"] + 3

    return Scenario(
        inputs, forward, reference, Counts(3, 1, 1, stores=(3, 3)), then=[next_stage], graphs=1
    )


@scenario("B48")
def test_48_layers_of_two_kinds_compile_two_graphs():
    """A layer that is compiled by itself holds nothing of the layer's number."""
    pools = Pools()
    kinds = ["swa", "swa", "full"] * 16
    layers = [
        tuple((pools.cache if kind == "swa" else pools.full_cache)(2 * i + j) for j in range(2))
        for i, kind in enumerate(kinds)
    ]
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs |= {"k_cache": layers[0][0], "v_cache": layers[0][1], "sliding": True}

    def forward(mapping, loc, k, k_cache, v_cache, sliding):
        slots = translate_loc(mapping, loc)  # also where it is not used
        store_kv(k_cache, v_cache, k, -k, slots if sliding else loc)
        return k + slots.sum()

    def reference(mapping, loc, k, k_cache, v_cache, sliding):
        slots = translate(mapping, loc)
        store(k_cache, slots if sliding else loc, k)
        store(v_cache, slots if sliding else loc, -k)
        return k + np.float32(slots.sum())

    def layer(i):
        def edit(inputs):
            inputs["k_cache"], inputs["v_cache"] = layers[i]
            inputs["sliding"] = kinds[i] == "swa"
            inputs["k"] = inputs["k"] + 1

        return edit

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(1, 1, 1, stores=(1, 1)),
        then=[layer(i) for i in range(1, 48)],
        graphs=2,
        atol=1e-3,
    )
