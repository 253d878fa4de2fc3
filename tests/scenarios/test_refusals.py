"""What has to fail: with an error that says what is wrong, and with every cache as it was."""

import importlib

import pytest
import torch

from swa_compile.ops import store_kv, translate_loc

from .pools import Pools, values
from .scenario import arrays_of, compile_with, refused

ENGINES = ["eager", "swa_eager"]


def three_layers():
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(5), "k": values(5, 2, 4)}
    return {**inputs, "caches": pools.caches(3)}


def at_fault(engine):
    """Which layer is wrong: compiled code stops ahead of all writes, eager code where it is."""
    return 0 if engine == "eager" else 2


def untranslated(layer):
    def forward(mapping, loc, k, caches):
        for i, cache in enumerate(caches):
            store_kv(*cache, k, k, loc if i == layer else translate_loc(mapping, loc))

    return forward


@pytest.mark.parametrize("engine", ENGINES)
def test_full_locations_in_a_sliding_layers_store_stop_the_forward(engine):
    """Row A2: a layer of SWAKVPool whose location nobody translated."""
    inputs = three_layers()
    bad = int(inputs["loc"][0])
    words = ("swa::store_kv: argument 'loc'", f"holds {bad} at position 0", "[-1, 48)")
    refused(engine, untranslated(at_fault(engine)), inputs, *words)


@pytest.mark.parametrize("layer", [0, 2])
def test_the_error_of_an_untranslated_store_says_which_store_it_is_and_where(layer):
    """Row A2: compiled code has no line of the model in its traceback, so the error has to say."""
    words = ("store_kv", f"store {layer + 1} of 3", "test_refusals.py:")
    refused("swa_eager", untranslated(layer), three_layers(), *words)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_without_locations_is_an_error_that_names_the_argument(engine):
    """Row B09: a backend that has no SWA metadata in this mode hands None on."""

    def forward(mapping, loc, k, caches):
        for i, cache in enumerate(caches):
            slots = None if i == at_fault(engine) else translate_loc(mapping, loc)
            store_kv(*cache, k, k, slots)

    refused(engine, forward, three_layers(), "swa::store_kv: argument 'loc'", "None")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_translation_of_no_locations_is_an_error_that_names_the_argument(engine):
    """Row B09, one step earlier."""

    def forward(mapping, loc, k, caches):
        for cache in caches:
            store_kv(*cache, k, k, translate_loc(mapping, None))

    refused(engine, forward, three_layers(), "swa::translate_loc: argument 'loc'", "None")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("ids", "rows"), [(62, 64), (5, 4), (0, 1)])
def test_fewer_or_more_locations_than_rows_are_refused_with_both_sizes(engine, ids, rows):
    """Rows B10 and B11: a translation of the batch ahead of its padding, keys behind it."""
    pools = Pools(full=300, swa=150)
    inputs = {"mapping": pools.mapping(), "loc": pools.live(64), "k": values(64, 2, 4)}
    inputs["caches"] = pools.caches(3)

    def forward(mapping, loc, k, caches):
        for i, cache in enumerate(caches):
            slots = translate_loc(mapping, loc)
            if i == at_fault(engine):
                store_kv(*cache, k[:rows], k[:rows], slots[:ids])
            else:
                store_kv(*cache, k, k, slots)

    words = ("swa::store_kv: argument 'loc'", "'k'", f"got {ids} ids for {rows} rows")
    refused(engine, forward, inputs, *words)


def test_symbolic_sizes_that_differ_are_refused_with_both_numbers():
    """Rows B10 and B11: the names of two symbols tell nobody which batch it was."""
    pools = Pools(full=300, swa=150)
    inputs = {"mapping": pools.mapping(), "loc": pools.live(62), "k": values(64, 2, 4)}
    inputs["caches"] = pools.caches(3)
    refused("swa_eager", correct, inputs, "'loc'", "'k'", "62", "64", dynamic=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_for_all_sizes_still_refuses_a_call_whose_sizes_differ(engine):
    """Rows B10 and B11: compiled with sizes that agree, then called with others that do not."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(6), "k": values(6, 2, 4)}
    inputs["caches"] = pools.caches(1)
    torch._dynamo.reset()
    with torch.no_grad():
        call = compile_with(engine, correct, dynamic=True)
        call(**inputs)
        inputs["loc"] = pools.live(5, skip=9)
        before = arrays_of(inputs["caches"])
        with pytest.raises(Exception, match=r"(?s)store_kv.*'loc'"):
            call(**inputs)
    for now, then in zip(arrays_of(inputs["caches"])[0], before[0], strict=True):
        assert (now == then).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_values_of_another_length_than_keys_are_refused(engine):
    def forward(mapping, loc, k, caches):
        for i, cache in enumerate(caches):
            v = k[1:] if i == at_fault(engine) else k
            store_kv(*cache, k, v, translate_loc(mapping, loc))

    refused(engine, forward, three_layers(), "swa::store_kv", "'v'", "5 ids for 4 rows")


def test_a_strict_engine_refuses_a_forward_that_edits_its_mapping():
    """Row B06: the promise that nothing behind the prologue reads the mapping cannot be kept."""

    def forward(mapping, loc, k, caches):
        for i, cache in enumerate(caches):
            store_kv(*cache, k, k, translate_loc(mapping, loc))
            if i == 0:
                mapping[loc] = 3

    words = ("strict=True", "MAPPING_WRITTEN", "test_refusals.py:")
    refused("swa_eager", forward, three_layers(), *words, strict=True)


@pytest.fixture
def dropped_write(monkeypatch):
    """A fault in the lowering of stores: the last write to a cache gets lost."""
    module = importlib.import_module("swa_compile.passes.pipeline")
    lower_stores = module.lower_stores

    def broken(graph):
        lowered = lower_stores(graph)
        last = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default][-1]
        graph.erase_node(last)
        return lowered

    monkeypatch.setattr(module, "lower_stores", broken)


def correct(mapping, loc, k, caches):
    for cache in caches:
        store_kv(*cache, k, -k, translate_loc(mapping, loc))


def test_an_error_of_a_pass_names_the_cache_and_the_switch(dropped_write):
    """Row B55: who meets it in production must be able to go on without the pass."""
    refused("swa_eager", correct, three_layers(), "'caches[2][1]'", "lower_stores=False")


def test_an_error_of_a_pass_names_the_pass_and_the_shape(dropped_write):
    """Row B55."""
    refused("swa_eager", correct, three_layers(), "lower_stores", "48, 2, 4")


def test_the_switch_that_the_error_names_does_turn_the_pass_off(dropped_write):
    inputs = three_layers()
    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(correct, backend="swa_eager", options={"lower_stores": False})
        call(**inputs)
    rows = inputs["mapping"][inputs["loc"]]
    assert all(torch.equal(k[rows], inputs["k"]) for k, _ in inputs["caches"])
    assert all(torch.equal(v[rows], -inputs["k"]) for _, v in inputs["caches"])
