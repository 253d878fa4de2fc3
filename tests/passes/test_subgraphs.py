"""Translations inside branches, loops and nested compile regions."""

import re

import numpy as np
import pytest
import torch
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

from swa_compile.ops import store_kv, translate_loc

LOC = torch.tensor([90, 41, -1, 77, 30])
ENGINES = ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)]


def expected(mapping, loc=LOC):
    return np.where(loc == -1, -1, mapping[loc].numpy())


def counts(report):
    return report.translations_found, report.translation_nodes, report.translations_left


@pytest.mark.parametrize("engine", ENGINES)
def test_what_every_branch_translates_is_lifted(engine, compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc, flag):
        def yes(mapping, loc):
            return translate_loc(mapping, loc) * 2

        def no(mapping, loc):
            return translate_loc(mapping, loc) * 3

        return torch.cond(flag, yes, no, (mapping, loc)) + translate_loc(mapping, loc)

    for flag in (True, False):
        result, (report,) = compiled(forward, mapping, LOC, torch.tensor(flag), engine=engine)
        assert result.tolist() == (expected(mapping) * (3 if flag else 4)).tolist()
        assert counts(report) == (3, 1, 0) and not report.refused
        assert [(value.mapping, value.loc) for value in report.values] == [("mapping", "loc")]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_one_branch_translates_stays_in_it_once(engine, compiled, make_mapping):
    """The other branch may run with ids that no pool has."""
    mapping = make_mapping()

    def forward(mapping, loc, flag):
        def yes(mapping, loc):
            return translate_loc(mapping, loc) + translate_loc(mapping, loc)

        def no(mapping, loc):
            return loc + mapping[0] * 0

        return torch.cond(flag, yes, no, (mapping, loc))

    result, (report,) = compiled(forward, mapping, LOC, torch.tensor(True), engine=engine)
    assert result.tolist() == (2 * expected(mapping)).tolist()
    assert counts(report) == (2, 1, 1)
    assert [refusal.code for refusal in report.refused] == ["IN_SUBGRAPH"]
    assert report.refused[0].source.startswith(__file__)

    strangers = torch.tensor([10**6, 1, 2, 3, 4])
    result, _ = compiled(forward, mapping, strangers, torch.tensor(False), engine=engine)
    assert result.tolist() == strangers.tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_loop_invariant_translations_leave_the_loop(engine, compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        def body(i, total):
            return i + 1, total + translate_loc(mapping, loc) * i

        start = torch.tensor(0), torch.zeros(5, dtype=torch.int64)
        return while_loop(lambda i, total: i < 4, body, start)[1]

    result, (report,) = compiled(forward, mapping, LOC, engine=engine)
    assert result.tolist() == (6 * expected(mapping)).tolist()
    assert counts(report) == (1, 1, 0)


def test_translations_of_loop_carried_ids_stay(compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        def body(i, ids):
            return i + 1, translate_loc(mapping, ids) % 90

        return while_loop(lambda i, ids: i < 3, body, (torch.tensor(0), loc % 90))[1]

    result, (report,) = compiled(forward, mapping, LOC)
    want = LOC.numpy() % 90
    for _ in range(3):
        want = mapping.numpy()[want] % 90
    assert result.tolist() == want.tolist()
    assert [refusal.code for refusal in report.refused] == ["IN_SUBGRAPH"]
    assert counts(report) == (1, 1, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_draft_steps_in_a_scan_translate_ahead_of_it(engine, compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc, xs):
        def step(carry, x):
            carry = carry + translate_loc(mapping, loc) * x
            return carry, carry + 0

        return scan(step, torch.zeros(5, dtype=torch.int64), xs)

    (last, every), (report,) = compiled(forward, mapping, LOC, torch.arange(1, 5), engine=engine)
    assert last.tolist() == (10 * expected(mapping)).tolist()
    assert every[1].tolist() == (3 * expected(mapping)).tolist()
    assert counts(report) == (1, 1, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_nested_regions_of_48_layers_translate_once_for_all_their_calls(
    engine, compiled, make_mapping, make_caches, oracle, tmp_path
):
    """A model of two layer kinds: each kind is one subgraph, whatever the depth."""
    layers = 48
    caches, before = make_caches(layers), make_caches(layers)
    mapping = make_mapping()
    k = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    @torch.compiler.nested_compile_region
    def sliding(k, mapping, loc):
        return k * 0.5, translate_loc(mapping, loc)

    @torch.compiler.nested_compile_region
    def full(k, loc):
        return k + 1, loc % 24

    def forward(mapping, loc, k, caches):
        for i, (k_cache, v_cache) in enumerate(caches):
            k, slots = full(k, loc) if i % 2 else sliding(k, mapping, loc)
            store_kv(k_cache, v_cache, k, k + 1, slots)
        return k

    _, (report,) = compiled(forward, mapping, LOC, k, caches, engine=engine, dump_dir=str(tmp_path))

    assert counts(report) == (24, 1, 0)
    (text,) = tmp_path.glob("pid-*/graph-*/00-functional.py")
    assert len(set(re.findall(r"class (repeated_subgraph\d+)\(", text.read_text()))) == 2
    rows, ids = k.numpy(), oracle.translate(mapping, LOC)
    for i, (cache, old) in enumerate(zip(caches, before, strict=True)):
        rows = rows + 1 if i % 2 else rows * np.float32(0.5)
        slots = LOC.numpy() % 24 if i % 2 else ids
        oracle.same_rows(cache[0], oracle.store(old[0], slots, rows))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 cannot functionalize such a region (aot_eager)"
)
def test_a_store_in_a_region_is_lowered_there(compiled, make_mapping, make_caches, oracle):
    (cache,), (before,) = make_caches(1), make_caches(1)
    mapping = make_mapping()
    k = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    @torch.compiler.nested_compile_region
    def layer(k, mapping, loc, k_cache, v_cache):
        store_kv(k_cache, v_cache, k, k + 1, translate_loc(mapping, loc))
        return k + 0

    _, (report,) = compiled(lambda *args: layer(*args), k, mapping, LOC, *cache)

    assert counts(report) == (1, 1, 0)
    assert (report.stores_found, report.stores_lowered) == (1, 1)
    oracle.same_rows(cache[0], oracle.store(before[0], oracle.translate(mapping, LOC), k))


def test_a_region_that_writes_is_refused_and_right(compiled, make_mapping, make_caches, oracle):
    """torch wraps the call of such a region and gives it a schema of its own: no further operand
    fits in. (A custom operator that writes in there is refused by torch itself.)"""
    caches, before = make_caches(4), make_caches(4)
    mapping = make_mapping()
    k = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    @torch.compiler.nested_compile_region
    def layer(k, mapping, loc, k_cache):
        k = k * 0.5
        k_cache.index_put_((translate_loc(mapping, loc).clamp(min=0),), k)
        return k + 0

    def forward(k, mapping, loc, caches):
        for k_cache, _ in caches:
            k = layer(k, mapping, loc, k_cache)
        return k

    _, (report,) = compiled(forward, k, mapping, LOC, caches)

    assert counts(report) == (4, 1, 1)
    assert [refusal.code for refusal in report.refused] == ["IN_SUBGRAPH"]
    rows = k.numpy()
    for cache, old in zip(caches, before, strict=True):
        rows = rows * np.float32(0.5)
        oracle.same_rows(cache[0], oracle.store(old[0], oracle.translate(mapping, LOC), rows))
