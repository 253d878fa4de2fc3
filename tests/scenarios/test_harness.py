"""The suite itself: a wrong row, a wrong count and a missed edit do fail a scenario."""

from dataclasses import replace

import numpy as np
import pytest

from swa_compile.ops import store_kv, translate_loc

from .pools import Pools, values
from .reference import read, store, translate
from .scenario import Counts, Scenario, refused, run


def good():
    """A scenario of two layers that holds."""
    pools = Pools()
    inputs = {"mapping": pools.mapping(), "loc": pools.live(4), "k": values(4, 2, 4)}
    inputs["caches"] = pools.caches(2)

    def forward(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, -k, translate_loc(mapping, loc))
        return k * 2

    def reference(mapping, loc, k, caches):
        for k_cache, v_cache in caches:
            store(k_cache, translate(mapping, loc), k)
            store(v_cache, translate(mapping, loc), -k)
        return k * 2

    return Scenario(inputs, forward, reference, Counts(2, 1, 1, stores=(2, 2)))


def test_a_scenario_that_holds_passes(tmp_path):
    assert run(good(), "eager", tmp_path) == []
    assert len(run(good(), "swa_eager", tmp_path)) == 1


@pytest.mark.parametrize("row", [1, 47])
def test_one_row_of_one_cache_that_differs_fails(row, tmp_path):
    scenario = good()

    def reference(mapping, loc, k, caches):
        scenario.reference(mapping, loc, k, caches)
        caches[1][0][row, 1, 3] += 0.125
        return k * 2

    with pytest.raises(AssertionError, match=rf"caches \(2\) differs at \[\[{row}, 1, 3\]\]"):
        run(replace(scenario, reference=reference), "swa_eager", tmp_path)


def test_the_sink_may_hold_anything(tmp_path):
    scenario = good()

    def reference(mapping, loc, k, caches):
        scenario.reference(mapping, loc, k, caches)
        caches[1][0][0] = np.nan
        return k * 2

    run(replace(scenario, reference=reference), "swa_eager", tmp_path)


def test_an_input_that_is_no_cache_is_compared_to_its_first_element(tmp_path):
    scenario = good()

    def forward(mapping, loc, k, caches):
        k[0, 0, 0] += 1
        return k * 2

    def reference(mapping, loc, k, caches):
        return (k + np.eye(1, 32, dtype=np.float32).reshape(4, 2, 4)) * 2

    changed = replace(scenario, forward=forward, reference=reference)
    with pytest.raises(AssertionError, match=r"k \(0\) differs at \[\[0, 0, 0\]\]"):
        run(changed, "eager", tmp_path)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (Counts(3, 1, 1, stores=(2, 2)), "found is 2, not 3"),
        (Counts(2, 1, 2, stores=(2, 2)), "values is 1, not 2"),
        (Counts(2, 1, 1, stores=(2, 1)), "stores is"),
        (Counts(2, 1, 1, refused=("MAPPING_WRITTEN",), stores=(2, 2)), "refused is"),
    ],
)
def test_another_count_fails(counts, words, tmp_path):
    with pytest.raises(AssertionError, match=words):
        run(replace(good(), counts=counts), "swa_eager", tmp_path)


def test_one_graph_more_fails(tmp_path):
    def edit(inputs):
        inputs["loc"], inputs["k"] = inputs["loc"][:3], inputs["k"][:3]

    with pytest.raises(AssertionError, match="2 graphs, not 1"):
        run(replace(good(), then=[edit]), "swa_eager", tmp_path)


def test_a_store_that_should_have_been_refused_fails():
    scenario = good()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused("eager", scenario.forward, scenario.inputs)


def test_a_refusal_that_wrote_a_row_fails():
    def forward(mapping, loc, k, caches):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))
        raise ValueError("too late")

    with pytest.raises(AssertionError, match="differs"):
        refused("eager", forward, good().inputs, "too late")


def test_live_ids_lie_beyond_the_pool_and_have_rows_of_their_own():
    for pools in (Pools(), Pools(full=24, swa=6, page=16), Pools(full=300, swa=150)):
        ids = pools.live(len(pools.live_pages) * pools.page)
        rows = pools.mapping()[ids]
        assert int(ids.min()) >= pools.rows
        assert sorted(rows.tolist()) == list(range(pools.page, pools.rows))
        assert int(pools.mapping()[-1]) == -1


def test_reads_of_none_are_zeros():
    cache = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    assert read(cache, np.array([-1, 2])).tolist() == [[0, 0], [5, 6]]
