"""Operators of somebody else: marked, unmarked, and writing what the passes read."""

import numpy as np
import pytest
import torch

import swa_compile
from swa_compile.ops import store_kv, translate_loc

LOC = torch.tensor([90, 41, -1, 77, 30])


@pytest.fixture(scope="module")
def engine_ops():
    """An engine's own ops: a translation that counts its calls, a store, an edit, a mystery."""
    calls = []

    def full_to_swa(loc, mapping):
        calls.append("full_to_swa")
        return torch.where(loc < 0, -1, mapping[loc.clamp_min(0)])

    def set_kv(cache, rows, loc):
        cache[loc.clamp_min(0)] = rows

    def edit(mapping, at):
        mapping[at] = 1

    def mystery(loc):
        return loc.clone()

    with torch.library._scoped_library("engine", "FRAGMENT") as library:
        library.define("full_to_swa(Tensor loc, Tensor mapping) -> Tensor")
        library.define("set_kv(Tensor(a!) cache, Tensor rows, Tensor loc) -> ()")
        library.define("edit(Tensor(a!) mapping, Tensor at) -> ()")
        library.define("mystery(Tensor loc) -> Tensor")
        for op in (full_to_swa, set_kv, edit, mystery):
            library.impl(op.__name__, op, "CPU")
        fakes = {
            "full_to_swa": lambda loc, mapping: torch.empty_like(loc, dtype=torch.int64),
            "set_kv": lambda cache, rows, loc: None,
            "edit": lambda mapping, at: None,
            "mystery": lambda loc: torch.empty_like(loc),
        }
        for name, fake in fakes.items():
            torch.library.register_fake(f"engine::{name}", fake, lib=library)
        swa_compile.mark_translation("engine::full_to_swa", mapping=1, loc=0)
        swa_compile.mark_store("engine::set_kv", caches=(0,), loc=2)
        yield calls


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_a_marked_translation_is_called_once(
    engine, engine_ops, compiled, make_mapping, make_caches, oracle
):
    caches, before = make_caches(4), make_caches(4)
    mapping = make_mapping()
    k = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    def forward(mapping, loc, k):
        for k_cache, _ in caches:
            slots = torch.ops.engine.full_to_swa(loc, mapping)
            torch.ops.engine.set_kv(k_cache, k, slots)

    engine_ops.clear()
    _, (report,) = compiled(forward, mapping, LOC, k, engine=engine)

    assert engine_ops == ["full_to_swa"]
    assert (report.translations_found, report.translation_nodes) == (4, 1)
    assert (report.stores_found, report.stores_lowered) == (4, 0)
    assert report.cache_copies in (0, None)
    ids = oracle.translate(mapping, LOC)
    for cache, old in zip(caches, before, strict=True):
        oracle.same_rows(cache[0], oracle.store(old[0], ids, k))


def test_a_declared_write_to_the_mapping_makes_a_new_value(
    engine_ops, compiled, make_mapping, make_caches, oracle
):
    caches, before = make_caches(3), make_caches(3)
    mapping = make_mapping()
    old_mapping = mapping.clone()
    k = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1))

    def forward(mapping, loc, k):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))
        torch.ops.engine.edit(mapping, loc[3:4])
        store_kv(*caches[1], k, k, translate_loc(mapping, loc))
        store_kv(*caches[2], k, k, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, LOC, k)

    assert [refusal.code for refusal in report.refused] == ["MAPPING_WRITTEN"] * 2
    assert report.translation_nodes == 2
    new = old_mapping.clone()
    new[77] = 1
    assert torch.equal(mapping, new)
    for i, seen in enumerate((old_mapping, new, new)):
        ids = oracle.translate(seen, LOC)
        oracle.same_rows(caches[i][0], oracle.store(before[i][0], ids, k))


def test_an_unmarked_operator_is_not_trusted(engine_ops, compiled, make_mapping):
    """Nothing is known about it: each call is a value of its own and stays where it is."""
    mapping = make_mapping()

    def forward(mapping, loc):
        first = translate_loc(mapping, torch.ops.engine.mystery(loc))
        return first + translate_loc(mapping, torch.ops.engine.mystery(loc))

    result, (report,) = compiled(forward, mapping, LOC)

    assert [refusal.code for refusal in report.refused] == ["IMPURE_PRODUCER"] * 2
    want = np.where(LOC == -1, -1, mapping[LOC].numpy())
    assert result.tolist() == (2 * want).tolist()
