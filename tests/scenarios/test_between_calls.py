"""What changes between two calls of compiled code: everything is read anew by each of them."""

import torch

from swa_compile.ops import store_kv, translate_loc, translate_page_table

from .pools import Pools, values
from .reference import read, store, translate
from .scenario import Counts, Scenario, scenario

LAYERS = 2


def step(mapping, loc, table, k, caches):
    """Store the new tokens, then read rows through the table."""
    seen = []
    for k_cache, v_cache in caches:
        store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
        slots = translate_page_table(mapping, table, 1).to(torch.int32)
        seen.append(k_cache[slots] + 1)
    return seen


def step_in_numpy(mapping, loc, table, k, caches):
    seen = []
    for k_cache, v_cache in caches:
        store(k_cache, translate(mapping, loc), k)
        store(v_cache, translate(mapping, loc), -k)
        seen.append(read(k_cache, translate(mapping, table)) + 1)
    return seen


COUNTS = Counts(2 * LAYERS, 1, 2, stores=(LAYERS, LAYERS))


def inputs_of(pools, n=6):
    return {
        "mapping": pools.mapping(),
        "loc": pools.live(n),
        "table": pools.pages(3, 4),
        "k": values(n, 2, 4),
        "caches": pools.caches(LAYERS),
    }


def edit_contents(pools):
    """An edit of locations, table and mapping in place, as a scheduler does it for a replay."""

    def edit(inputs):
        inputs["loc"].copy_(pools.live(6, skip=13))
        inputs["table"].copy_(pools.pages(3, 4, skip=20))
        live = pools.live(40)
        inputs["mapping"][live] = inputs["mapping"][live].roll(1)

    return edit


@scenario("A6", "B06", inductor=True)
def test_every_call_reads_the_contents_that_buffers_have_then():
    """Static buffers as under CUDA graphs: their addresses stay, nothing tells of an edit."""
    pools = Pools()

    def evict(inputs):
        inputs["mapping"][inputs["table"][0].long()] = 0

    return Scenario(
        inputs_of(pools),
        step,
        step_in_numpy,
        COUNTS,
        then=[edit_contents(pools), evict, edit_contents(pools)],
    )


@scenario("B06")
def test_new_locations_in_the_same_storage_are_new_locations():
    """Another tensor object at the same address: no memo may be keyed by the pointer."""
    pools = Pools()
    arena = torch.zeros(64, dtype=torch.int64)
    inputs = inputs_of(pools)
    arena[:6] = inputs["loc"]
    inputs["loc"] = arena[:6]

    def next_batch(inputs):
        arena[:6] = pools.live(6, skip=30)
        inputs["loc"] = arena[:6]

    return Scenario(inputs, step, step_in_numpy, COUNTS, then=[next_batch])


@scenario("B06")
def test_a_longer_mapping_in_the_place_of_the_old_one_is_read():
    pools, longer = Pools(), Pools(full=200, seed=3)

    def grow(inputs):
        inputs["mapping"] = longer.mapping()
        inputs["loc"], inputs["table"] = longer.live(6), longer.pages(3, 4, skip=7)

    return Scenario(inputs_of(pools), step, step_in_numpy, COUNTS, then=[grow], graphs=2)


@scenario("B06")
def test_a_mapping_edited_between_two_layers_is_two_values_and_the_report_says_so():
    """An engine that gives new tokens their rows in the middle of the forward."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs |= {"rows": torch.arange(30, 35), "caches": pools.caches(4)}

    def forward(mapping, loc, k, rows, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            if i == 2:
                mapping[loc] = rows
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))

    def reference(mapping, loc, k, rows, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            if i == 2:
                for slot, row in zip(loc, rows, strict=True):
                    mapping[slot] = row
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)

    def edit(inputs):
        inputs["mapping"].copy_(pools.mapping())
        inputs["loc"], inputs["rows"] = pools.live(5, skip=7), torch.arange(5, 10)

    # The first value can stand in the prologue; it is reported all the same.
    counts = Counts(4, 2, 2, left=1, refused=("MAPPING_WRITTEN",) * 2, stores=(4, 4))
    return Scenario(inputs, forward, reference, counts, then=[edit])


@scenario("B51", inductor=True)
def test_a_replaced_pool_is_the_one_that_is_written():
    """Mapping and caches of other sizes, then of the first sizes again, at other addresses."""
    first, second, third = Pools(), Pools(full=250, swa=80, seed=1), Pools(seed=2)
    old = {}

    def replace(pools):
        def edit(inputs):
            old["caches"] = [(c, c.clone()) for pair in inputs["caches"] for c in pair]
            inputs.update(inputs_of(pools))

        return edit

    def old_pool_is_left_alone(inputs, outputs):
        assert all(torch.equal(now, then) for now, then in old.get("caches", []))

    return Scenario(
        inputs_of(first),
        step,
        step_in_numpy,
        COUNTS,
        then=[replace(second), replace(third)],
        graphs=2,
        check=old_pool_is_left_alone,
    )


@scenario("A12")
def test_the_mapping_is_an_operand_and_never_a_constant():
    """Frozen-KV MTP: the target's pool and mapping stand in the draft's place for some calls."""
    target, draft = Pools(seed=1), Pools(seed=2)

    def swap(pools):
        def edit(inputs):
            inputs["mapping"], inputs["caches"] = pools.mapping(), pools.caches(LAYERS)

        return edit

    return Scenario(inputs_of(draft), step, step_in_numpy, COUNTS, then=[swap(target), swap(draft)])


def maybe_translated(mapping, loc, k, caches):
    """A draft model with a full pool of its own has no mapping."""
    for k_cache, v_cache in caches:
        slots = loc if mapping is None else translate_loc(mapping, loc)
        store_kv(k_cache, v_cache, k, -k, slots)


def maybe_translated_in_numpy(mapping, loc, k, caches):
    for k_cache, v_cache in caches:
        slots = loc if mapping is None else translate(mapping, loc)
        store(k_cache, slots, k)
        store(v_cache, slots, -k)


@scenario("A12")
def test_where_there_is_no_mapping_nothing_is_translated():
    pools = Pools()
    inputs = {"mapping": None, "loc": pools.live(6), "k": values(6, 2, 4)}
    inputs["caches"] = [(pools.full_cache(i), pools.full_cache(i + 9)) for i in range(LAYERS)]
    counts = Counts(0, 0, 0, stores=(LAYERS, LAYERS))
    return Scenario(
        inputs,
        maybe_translated,
        maybe_translated_in_numpy,
        counts,
        calls_of={"aten.index.Tensor": 0},
    )


@scenario("B07")
def test_with_or_without_a_mapping_is_decided_per_call():
    """Compiled over a pool without mapping, then called with one that has it, and again."""
    pools = Pools()
    full = [(pools.full_cache(i), pools.full_cache(i + 9)) for i in range(LAYERS)]
    swa = pools.caches(LAYERS)
    inputs = {"mapping": None, "loc": pools.live(6), "k": values(6, 2, 4), "caches": full}

    def hybrid(inputs):
        inputs["mapping"], inputs["caches"] = pools.mapping(), swa

    def plain(inputs):
        inputs["mapping"], inputs["caches"] = None, full
        inputs["loc"], inputs["k"] = pools.live(6, skip=8), inputs["k"] + 1

    stores = (LAYERS, LAYERS)
    return Scenario(
        inputs,
        maybe_translated,
        maybe_translated_in_numpy,
        [Counts(0, 0, 0, stores=stores), Counts(LAYERS, 1, 1, stores=stores)],
        then=[hybrid, plain, hybrid],
        graphs=2,
    )


@scenario("B45", over=["tensor", "float", "int"])
def test_a_number_that_changes_is_used(kind):
    """A scale or an offset on the host, different in every call."""
    pools = Pools()
    number = {"tensor": lambda x: torch.tensor(x * 0.5), "float": lambda x: x * 0.5, "int": int}
    number = number[kind]
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    inputs |= {"number": number(3), "caches": pools.caches(LAYERS)}

    def forward(mapping, loc, k, number, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k * number, k, translate_loc(mapping, loc))

    def reference(mapping, loc, k, number, caches):
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k * number)
            store(v_cache, translate(mapping, loc), k)

    def change(x):
        def edit(inputs):
            inputs["number"] = number(x)

        return edit

    return Scenario(
        inputs,
        forward,
        reference,
        Counts(LAYERS, 1, 1, stores=(LAYERS, LAYERS)),
        then=[change(5), change(7), change(3)],
        graphs=1 if kind == "tensor" else 2,
    )
