"""A variant is compared with eager code, and what is wrong with it is found."""

import numpy as np
import pytest
import torch

from swa_compile.bench.checking import Oracle, WrongVariant
from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.inputs import Setting
from swa_compile.bench.model import aten, by_hand, natural, store_aten
from swa_compile.bench.variants import VARIANTS
from swa_compile.ops import store_kv

SMALL = CONFIGS["small"]


@pytest.fixture(scope="module")
def setting():
    with torch.no_grad():
        return Setting.make(SMALL, Shape.of(SMALL, 4), torch.device("cpu"))


@pytest.fixture
def oracle(setting):
    with torch.no_grad():
        yield Oracle(setting)


def step_of(setting, way=natural, store=store_kv):
    return lambda: setting.decoder(setting.x, setting.batch, way, store)


@pytest.mark.parametrize(
    ("way", "store"), [(natural, store_kv), (aten, store_aten), (by_hand, store_kv)]
)
def test_the_three_ways_to_the_indices_agree(setting, oracle, way, store):
    checked = oracle.check(step_of(setting, way, store))
    assert checked.output < 1e-6 and checked.rows < 1e-6


def test_eager_code_agrees_with_indices_made_in_numpy(setting, oracle):
    def numpy_way(batch):
        mapping = batch.full_to_swa_index_mapping.numpy()
        loc = torch.from_numpy(mapping[batch.out_cache_loc.numpy()])
        table = torch.from_numpy(mapping[batch.page_table.numpy()].astype(np.int32))
        return lambda: (loc, table)

    assert oracle.check(step_of(setting, numpy_way)).rows < 1e-6


def wrong_table(batch):
    loc, table = natural(batch)()
    return lambda: (loc, table.roll(1, 0))


def shifted_table(batch):
    loc, table = natural(batch)()
    return lambda: (loc, table.roll(1, 1))


def wrong_rows(batch):
    loc, table = natural(batch)()
    return lambda: (loc.roll(1), table)


def other_rows(batch):
    loc, table = natural(batch)()
    return lambda: ((loc + 1) % 128, table)


def stores_nothing(k_cache, v_cache, k, v, loc):
    pass


def swaps_k_and_v(k_cache, v_cache, k, v, loc):
    store_kv(v_cache, k_cache, k, v, loc)


def writes_one_row_more(k_cache, v_cache, k, v, loc):
    free = [i for i in range(1, len(v_cache)) if i not in loc.tolist()]
    store_kv(k_cache, v_cache, k, v, loc)
    v_cache[free[5], 0, 0] += 1e-3


def stores_rounded(k_cache, v_cache, k, v, loc):
    store_kv(k_cache, v_cache, k.bfloat16().float(), v, loc)


@pytest.mark.parametrize(
    ("way", "store", "words"),
    [
        (wrong_table, store_kv, "output of request"),
        (shifted_table, store_kv, "output of request"),
        (wrong_rows, store_kv, "is off by"),
        (other_rows, store_kv, "no token of the batch belongs there"),
        (natural, stores_nothing, "is off by"),
        (natural, swaps_k_and_v, "is off by"),
        (natural, writes_one_row_more, r"V of layer 0 \(swa\): row \d+ changed"),
        (natural, stores_rounded, "is off by"),
    ],
)
def test_a_wrong_variant_is_found(setting, oracle, way, store, words):
    with pytest.raises(WrongVariant, match=words):
        oracle.check(step_of(setting, way, store))


def test_indices_kept_from_the_first_batch_are_found(setting, oracle):
    """What a captured graph that holds on to values would do."""
    setting.load(0)
    kept = [value.clone() for value in natural(setting.batch)()]
    with pytest.raises(WrongVariant, match="batch 1"):
        oracle.check(step_of(setting, lambda batch: lambda: tuple(kept)))


def test_not_a_number_is_found(setting, oracle):
    def step():
        out = step_of(setting)()
        out[2] = torch.nan
        return out

    with pytest.raises(WrongVariant, match="output of request 2 is off by inf"):
        oracle.check(step)


def test_a_wrong_table_shows_at_the_longest_window(setting):
    """With flat scores attention would average the window away."""
    config = CONFIGS["small"]
    long = Shape.of(config, 4, window=2048)
    with torch.no_grad():
        wide = Setting.make(config, long, torch.device("cpu"))
        oracle = Oracle(wide)
        with pytest.raises(WrongVariant):
            oracle.check(step_of(wide, wrong_table))


def test_every_variant_is_one_of_the_ways_that_are_compared():
    assert {variant.way for variant in VARIANTS.values()} == {natural, aten, by_hand}
    letters = [variant.letter for variant in VARIANTS.values()]
    assert letters == ["a", "b", "c", "d", "e", "f", "ours", "ours", "ours"]
