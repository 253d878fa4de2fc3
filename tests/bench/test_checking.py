"""A variant is compared with eager code, and what is wrong with it is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swa_compile.bench.checking import Oracle, WrongVariant
from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.inputs import Setting
from swa_compile.bench.model import aten, by_hand, natural, store_aten
from swa_compile.bench.rounding import in_float32
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


@pytest.mark.parametrize(
    "change",
    [lambda out: out[0], lambda out: out[None], lambda out: out.expand(3, -1), lambda out: out[:0]],
)
def test_an_output_of_another_shape_is_found(change):
    """One request's would be broadcast: all of its rows are the one that is wanted."""
    with torch.no_grad():
        single = Setting.make(SMALL, Shape.of(SMALL, 1), torch.device("cpu"))
        oracle = Oracle(single)
        with pytest.raises(WrongVariant, match=r"the output has shape \(.*, and not \(1, \d+\)"):
            oracle.check(lambda: change(step_of(single)()))


def writes_x(setting):
    setting.x.add_(1)


def translates_in_place(setting):
    table = setting.batch.page_table
    table.copy_(setting.batch.full_to_swa_index_mapping[table])


def forgets_the_mapping(setting):
    setting.batch.full_to_swa_index_mapping.zero_()


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (writes_x, "x"),
        (translates_in_place, "page_table"),
        (forgets_the_mapping, "full_to_swa_index_mapping"),
    ],
)
def test_a_variant_that_writes_its_inputs_is_found(setting, oracle, write, name):
    """Its first call is right; those that are timed would not be."""

    def step():
        out = step_of(setting)()
        write(setting)
        return out

    with pytest.raises(WrongVariant, match=f"the input {name} was written"):
        oracle.check(step)


def test_a_variant_that_moves_its_rows_along_with_the_mapping_is_found(setting, oracle):
    """Which rows are compared is not for the variant to say."""

    def step():
        mapping, loc = setting.batch.full_to_swa_index_mapping, setting.batch.out_cache_loc
        mapping[loc] = mapping[loc.roll(1)].clone()
        return step_of(setting)()

    with pytest.raises(WrongVariant):
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


DEEP = replace(
    SMALL,
    layers=("swa", "swa", "full") * 8,
    mlp="geglu",
    post_norms=True,
    sinks=True,
    dtype=torch.bfloat16,
)


@pytest.fixture(scope="module")
def deep():
    with torch.no_grad():
        return Setting.make(DEEP, Shape.of(DEEP, 8), torch.device("cpu"))


def test_a_bfloat16_model_in_float32_is_the_float32_model(deep):
    with torch.no_grad():
        exact = Setting.make(
            replace(DEEP, dtype=torch.float32), Shape.of(DEEP, 8), torch.device("cpu")
        )
        exact.decoder.load_state_dict(deep.decoder.state_dict())
        before = [cache.clone() for cache in deep.decoder.caches(2)]
        deep.load(1)
        output, rows = in_float32(deep)
        exact.load(1)
        want = exact.decoder(deep.x.float(), exact.batch)
        written = exact.written()
        for i, pair in enumerate(rows):
            for got, cache in zip(pair, exact.decoder.caches(i), strict=True):
                torch.testing.assert_close(got, cache[written[DEEP.layers[i]]])
    torch.testing.assert_close(output, want)
    for cache, kept in zip(deep.decoder.caches(2), before, strict=True):
        assert torch.equal(cache, kept)


def test_the_tolerance_in_bfloat16_is_what_rounding_does_to_this_model(deep):
    """A fixed one was too narrow for 48 layers, and wider than need be for few."""
    with torch.no_grad():
        shallow = Setting.make(
            replace(DEEP, layers=DEEP.layers[:3]), Shape.of(DEEP, 8), torch.device("cpu")
        )
        few, many = Oracle(shallow), Oracle(deep)
    assert 2**-8 < few.rounding < many.rounding < 0.2
    assert few.tolerance == 2 * few.rounding and many.tolerance == 2 * many.rounding


def test_a_deep_model_rounded_at_other_places_is_right(deep):
    with torch.no_grad():
        oracle = Oracle(deep)

        def step():
            output, rows = in_float32(deep)
            for i, pair in enumerate(rows):
                loc = deep.written()[DEEP.layers[i]]
                for cache, row in zip(deep.decoder.caches(i), pair, strict=True):
                    cache[loc] = row.to(cache.dtype)
            return output

        assert 0 < oracle.check(step).output <= oracle.rounding


@pytest.mark.parametrize(
    ("way", "store"),
    [
        (wrong_table, store_kv),
        (shifted_table, store_kv),
        (wrong_rows, store_kv),
        (other_rows, store_kv),
        (natural, stores_nothing),
        (natural, swaps_k_and_v),
        (natural, writes_one_row_more),
    ],
)
def test_a_wrong_variant_of_a_deep_model_is_found(deep, way, store):
    with torch.no_grad():
        oracle = Oracle(deep)
        with pytest.raises(WrongVariant):
            oracle.check(step_of(deep, way, store))


def test_a_model_that_rounding_takes_apart_is_refused():
    """Its tolerance would let a stale row pass."""
    steep = replace(DEEP, layers=DEEP.layers[:3])
    with torch.no_grad():
        setting = Setting.make(steep, Shape.of(steep, 8), torch.device("cpu"))
        for layer in setting.decoder.layers:
            layer.heads.q_norm.weight.mul_(1000)  # attention by the largest score: any key, rounded
        with pytest.raises(ValueError, match="a wrong row would go unseen"):
            Oracle(setting)


def test_every_variant_is_one_of_the_ways_that_are_compared():
    assert {variant.way for variant in VARIANTS.values()} == {natural, aten, by_hand}
    letters = [variant.letter for variant in VARIANTS.values()]
    assert letters == ["a", "b", "c", "d", "e", "f", "ours", "ours", "ours", "ours"]
