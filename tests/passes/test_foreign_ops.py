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

    def set_many(caches, rows, loc):
        for i, cache in enumerate(caches):
            cache[loc] = rows + i

    def set_two(k, k_cache, rows, loc):
        k[loc], k_cache[loc] = rows, -rows

    def edit(mapping, at):
        mapping[at] = 1

    def like_ids(loc, mapping):
        return mapping[loc.long()].to(loc.dtype)

    def mystery(loc):
        return loc.clone()

    with torch.library._scoped_library("engine", "FRAGMENT") as library:
        library.define("full_to_swa(Tensor loc, Tensor mapping) -> Tensor")
        library.define("like_ids(Tensor loc, Tensor mapping) -> Tensor")
        library.define("set_kv(Tensor(a!) cache, Tensor rows, Tensor loc) -> ()")
        library.define("set_many(Tensor(a!)[] caches, Tensor rows, Tensor loc) -> ()")
        library.define("set_two(Tensor(a!) k, Tensor(b!) k_cache, Tensor rows, Tensor loc) -> ()")
        library.define("edit(Tensor(a!) mapping, Tensor at) -> ()")
        library.define("mystery(Tensor loc) -> Tensor")
        for op in (full_to_swa, like_ids, set_kv, set_many, set_two, edit, mystery):
            library.impl(op.__name__, op, "CPU")
        fakes = {
            "full_to_swa": lambda loc, mapping: torch.empty_like(loc, dtype=torch.int64),
            "like_ids": lambda loc, mapping: torch.empty_like(loc),
            "set_kv": lambda cache, rows, loc: None,
            "set_many": lambda caches, rows, loc: None,
            "set_two": lambda k, k_cache, rows, loc: None,
            "edit": lambda mapping, at: None,
            "mystery": lambda loc: torch.empty_like(loc),
        }
        for name, fake in fakes.items():
            torch.library.register_fake(f"engine::{name}", fake, lib=library)
        swa_compile.mark_translation("engine::full_to_swa", mapping=1, loc=0)
        swa_compile.mark_translation("engine::like_ids", mapping=1, loc=0)
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


@pytest.mark.parametrize("first", [torch.int32, torch.int64])
def test_a_translation_whose_dtype_follows_its_ids_keeps_both_dtypes(
    first, engine_ops, compiled, make_mapping
):
    """Narrow and widened ids are one value to our operators, and two to this one."""
    mapping, loc = make_mapping(), torch.tensor([90, 41, 77, 30], dtype=torch.int32)
    second = torch.int64 if first is torch.int32 else torch.int32

    def forward(mapping, loc):
        return [
            torch.ops.engine.like_ids(loc.to(dtype), mapping) * 1000
            for dtype in (first, second, first)
        ]

    results, (report,) = compiled(forward, mapping, loc)

    assert [result.dtype for result in results] == [first, second, first]
    want = mapping[loc.long()] * 1000
    assert all(torch.equal(result, want.to(result.dtype)) for result in results)
    assert (report.translations_found, report.translation_nodes, len(report.values)) == (3, 1, 2)


def test_a_translation_whose_layout_follows_its_ids_keeps_it(engine_ops, compiled, make_mapping):
    mapping = make_mapping()
    loc = torch.tensor([[90, 41, 77], [30, 12, 5]])

    def forward(mapping, loc):
        flat = torch.ops.engine.like_ids(loc.t(), mapping).t().view(6)
        return flat + torch.ops.engine.like_ids(loc, mapping).view(6)

    result, (report,) = compiled(forward, mapping, loc)
    assert torch.equal(result, 2 * mapping[loc].view(6))
    assert report.translation_nodes == 1


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("begin", [0, 1])
def test_writes_to_lists_and_to_arguments_with_one_prefix_are_right_or_refused(
    engine, begin, engine_ops, compiled
):
    """`k` and `k_cache`: the one's description must not be taken for the other's."""
    whole = torch.randn(4, 2, 16, 4, generator=torch.Generator().manual_seed(1))
    before, loc, rows = whole.clone(), torch.tensor([3, 5]), torch.ones(2, 4)

    def forward(pool, loc, rows):
        torch.ops.engine.set_many([pool[0, 1], pool[1, 0]], rows, loc)
        torch.ops.engine.set_two(pool[2, 0], pool[1, 1], rows * 5, loc)

    if begin:  # symbolic sizes, and an input that begins inside its storage
        with pytest.raises(Exception, match=r"caches\[0\].*shifted rows"):
            compiled(forward, whole[1:], loc, rows, engine=engine, dynamic=True)
    else:
        compiled(forward, whole, loc, rows, engine=engine, dynamic=True)
        for layer, half, value in ((0, 1, 1), (1, 0, 2), (2, 0, 5), (1, 1, -5)):
            before[layer, half, loc] = value
    assert torch.equal(whole, before)
