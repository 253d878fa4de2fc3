"""The hoist: what becomes one value, what does not, and that every cache row is right."""

import numpy as np
import pytest
import torch

from swa_compile.ops import store_kv, translate_loc, translate_page_table, translate_paged_loc

ROWS = 24
LOC = torch.tensor([90, 41, -1, 77, 30])


def rows(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 4, generator=generator)


def test_translations_of_every_layer_become_one_node(compiled, make_mapping, make_caches, oracle):
    caches, before = make_caches(6), make_caches(6)
    mapping, k = make_mapping(), rows(5)

    def forward(mapping, loc, k):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k + 1, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, LOC, k)

    assert (report.translations_found, report.translation_nodes) == (6, 1)
    assert report.translations_left == 0 and not report.refused
    (value,) = report.values
    assert (value.mapping, value.loc, value.shape, value.uses) == ("mapping", "loc", (5,), 6)
    assert value.source.startswith(__file__)
    assert (report.stores_found, report.stores_lowered) == (6, 6)
    ids = oracle.translate(mapping, LOC)
    for (k_cache, v_cache), (k_old, v_old) in zip(caches, before, strict=True):
        oracle.same_rows(k_cache, oracle.store(k_old, ids, k))
        oracle.same_rows(v_cache, oracle.store(v_old, ids, k + 1))


def test_page_table_and_loc_share_the_node(compiled, make_mapping):
    mapping = torch.cat([torch.arange(0, 64) // 2, torch.tensor([-1])])
    table = torch.tensor([[3, 1, -1], [0, 2, 3]], dtype=torch.int32)

    def forward(mapping, loc, table):
        out = []
        for _ in range(3):
            out.append(translate_loc(mapping, loc) + 0)
            out.append(translate_page_table(mapping, table, 16).to(torch.int32) + 0)
        return out

    result, (report,) = compiled(forward, mapping, torch.tensor([5, 60]), table)

    assert (report.translations_found, report.translation_nodes) == (6, 1)
    assert {value.loc for value in report.values} == {"loc", "table"}
    for i in range(3):
        assert result[2 * i].tolist() == [2, 30]
        assert result[2 * i + 1].dtype == torch.int32
        # page 3 starts at token 48, which maps to 24: SWA page 24 // 16 = 1
        assert result[2 * i + 1].tolist() == [[1, 0, -1], [0, 1, 1]]


def test_paged_translation_sends_tombstones_and_strangers_to_the_sink(compiled):
    table = torch.tensor([5, -1, 7])
    loc = torch.tensor([1, 17, 33, -1, 48, 2])

    def forward(table, loc):
        return translate_paged_loc(table, loc, 16) + translate_paged_loc(table, loc, 16)

    result, (report,) = compiled(forward, table, loc)

    assert (report.translations_found, report.translation_nodes) == (2, 1)
    assert result.tolist() == [2 * x for x in (81, 0, 113, 0, 0, 82)]


def test_two_mappings_are_never_merged(compiled, make_mapping, make_caches, oracle):
    caches, before = make_caches(2), make_caches(2)
    a, b, k = make_mapping(1), make_mapping(2), rows(5)

    def forward(a, b, loc, k):
        store_kv(*caches[0], k, k, translate_loc(a, loc))
        store_kv(*caches[1], k, k, translate_loc(b, loc))

    _, (report,) = compiled(forward, a, b, LOC, k)

    assert [value.mapping for value in report.values] == ["a", "b"]
    assert report.translation_nodes == 1
    for cache, old, mapping in zip(caches, before, (a, b), strict=True):
        oracle.same_rows(cache[0], oracle.store(old[0], oracle.translate(mapping, LOC), k))


def test_a_loc_padded_in_the_graph_is_another_value(compiled, make_mapping, make_caches, oracle):
    caches, before = make_caches(2), make_caches(2)
    mapping, k = make_mapping(), rows(8)

    def forward(mapping, loc, k):
        store_kv(*caches[0], k[:5], k[:5], translate_loc(mapping, loc))
        padded = torch.cat([loc, torch.zeros(3, dtype=torch.int64)])
        store_kv(*caches[1], k, k, translate_loc(mapping, padded))

    _, (report,) = compiled(forward, mapping, LOC, k)

    assert [value.shape for value in report.values] == [(5,), (8,)]
    assert report.translation_nodes == 1
    ids = oracle.translate(mapping, LOC)
    oracle.same_rows(caches[0][0], oracle.store(before[0][0], ids, k[:5]))
    padded_ids = np.append(ids, [mapping[0]] * 3)
    oracle.same_rows(caches[1][0], oracle.store(before[1][0], padded_ids, k))


def test_equal_slices_in_every_layer_are_one_value(compiled, make_mapping, make_caches, oracle):
    caches, before = make_caches(4), make_caches(4)
    mapping, k = make_mapping(), rows(3)

    def forward(mapping, loc, k):
        for k_cache, v_cache in caches:
            store_kv(k_cache, v_cache, k, k, translate_loc(mapping, loc[:3]))

    _, (report,) = compiled(forward, mapping, LOC, k)

    assert len(report.values) == 1 and report.values[0].shape == (3,)
    ids = oracle.translate(mapping, LOC[:3])
    for cache, old in zip(caches, before, strict=True):
        oracle.same_rows(cache[0], oracle.store(old[0], ids, k))


def test_halves_of_a_batch_share_their_parents_gather(compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        return translate_loc(mapping, loc[:2]) * 2, translate_loc(mapping, loc[2:]) * 3

    (low, high), (report,) = compiled(forward, mapping, LOC)

    (value,) = report.values
    assert value.loc == "loc" and value.uses == 2
    want = [-1 if i == -1 else int(mapping[i]) for i in LOC.tolist()]
    assert low.tolist() == [2 * x for x in want[:2]]
    assert high.tolist() == [3 * x for x in want[2:]]


def test_a_single_part_is_translated_alone(compiled, make_mapping):
    """The rest of the tensor may hold ids that no pool has."""
    mapping = make_mapping()
    loc = torch.tensor([5, 6, 10**6])

    def forward(mapping, loc):
        return translate_loc(mapping, loc[:2]) + translate_loc(mapping, loc[:2])

    result, (report,) = compiled(forward, mapping, loc)

    assert report.values[0].shape == (2,)
    assert result.tolist() == [2 * int(mapping[5]), 2 * int(mapping[6])]


def test_draft_steps_share_one_gather(compiled, make_mapping, make_caches, oracle):
    bs, topk, steps = 2, 2, 3
    caches, before = make_caches(steps), make_caches(steps)
    mapping = make_mapping()
    loc = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:12] + 3
    k = rows(bs * topk)

    def forward(mapping, loc, k):
        for i in range(steps):
            mine = loc.view(bs, topk, steps).permute(2, 0, 1).reshape(steps, -1)[i]
            store_kv(*caches[i], k + i, k + i, translate_loc(mapping, mine))

    _, (report,) = compiled(forward, mapping, loc, k)

    (value,) = report.values
    assert (value.loc, value.shape, value.uses) == ("loc", (12,), 3)
    by_step = loc.numpy().reshape(bs, topk, steps).transpose(2, 0, 1).reshape(steps, -1)
    for i in range(steps):
        ids = oracle.translate(mapping, by_step[i])
        oracle.same_rows(caches[i][0], oracle.store(before[i][0], ids, k + i))


def test_int32_and_int64_users_share_one_gather(compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        narrow = translate_loc(mapping, loc).to(torch.int32)
        wide = translate_loc(mapping, loc)
        again = translate_loc(mapping, loc).to(torch.int32)
        return narrow + again, wide + 0

    (narrow, wide), (report,) = compiled(forward, mapping, LOC)

    assert len(report.values) == 1 and report.values[0].uses == 3
    assert narrow.dtype == torch.int32 and wide.dtype == torch.int64
    assert narrow.tolist() == [2 * x for x in wide.tolist()]


def test_widened_ids_are_the_same_ids(compiled, make_mapping):
    mapping, loc = make_mapping(), LOC.to(torch.int32)

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + translate_loc(mapping, loc.long())

    result, (report,) = compiled(forward, mapping, loc)

    assert len(report.values) == 1
    assert result.tolist() == [-2 if i == -1 else 2 * int(mapping[i]) for i in LOC.tolist()]


def test_narrowed_ids_are_other_ids(compiled, make_mapping):
    """int64 -> int32 -> int64 can lose an id, so it is not the loc that it came from."""
    mapping = make_mapping()

    def forward(mapping, loc):
        return translate_loc(mapping, loc) + translate_loc(mapping, loc.to(torch.int32).long())

    _, (report,) = compiled(forward, mapping, LOC)

    assert len(report.values) == 2 and report.translation_nodes == 1


def test_mapping_written_between_keeps_two_values(compiled, make_mapping, make_caches, oracle):
    caches, before = make_caches(2), make_caches(2)
    mapping, k = make_mapping(), rows(5)
    old_mapping = mapping.clone()

    def forward(mapping, loc, k):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))
        mapping[loc[3:4]] = 1
        store_kv(*caches[1], k, k, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, LOC, k)

    assert [refusal.code for refusal in report.refused] == ["MAPPING_WRITTEN"] * 2
    assert report.translation_nodes == 2
    assert report.refused[0].source.startswith(__file__)
    assert int(mapping[77]) == 1
    oracle.same_rows(
        caches[0][0], oracle.store(before[0][0], oracle.translate(old_mapping, LOC), k)
    )
    oracle.same_rows(caches[1][0], oracle.store(before[1][0], oracle.translate(mapping, LOC), k))


def test_ids_from_activations_are_translated_once_behind_their_producer(
    compiled, make_mapping, make_caches, oracle
):
    caches, before = make_caches(2), make_caches(2)
    mapping, k = make_mapping(), rows(5)
    score = torch.rand(5, 90, generator=torch.Generator().manual_seed(2))

    def forward(mapping, score, k):
        for cache in caches:
            store_kv(*cache, k, k, translate_loc(mapping, score.argmax(-1)))

    _, (report,) = compiled(forward, mapping, score, k)

    assert [refusal.code for refusal in report.refused] == ["LOC_FROM_ACTIVATIONS"]
    assert (report.translations_left, report.translation_nodes) == (1, 1)
    ids = oracle.translate(mapping, score.numpy().argmax(-1))
    for cache, old in zip(caches, before, strict=True):
        oracle.same_rows(cache[0], oracle.store(old[0], ids, k))


def test_random_ids_are_refused_and_not_merged(compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping):
        a, b = (torch.randint(1, 90, (64,)) for _ in "ab")
        return translate_loc(mapping, a) - mapping[a], translate_loc(mapping, b) - mapping[b], a, b

    (first, second, a, b), (report,) = compiled(forward, mapping)

    assert [refusal.code for refusal in report.refused] == ["IMPURE_PRODUCER"] * 2
    assert not first.any() and not second.any() and not torch.equal(a, b)


@pytest.mark.parametrize("engine", ["swa_eager", pytest.param("swa", marks=pytest.mark.inductor)])
def test_returned_translations_do_not_alias(engine, compiled, make_mapping):
    mapping = make_mapping()

    def forward(mapping, loc):
        a, b = translate_loc(mapping, loc), translate_loc(mapping, loc)
        return a, b, translate_loc(mapping, loc)[1:]

    (a, b, c), (report,) = compiled(forward, mapping, LOC, engine=engine)

    assert report.translation_nodes == 1
    want = [-1 if i == -1 else int(mapping[i]) for i in LOC.tolist()]
    a[:] = 1000
    assert b.tolist() == want and c.tolist() == want[1:]
    c[:] = 2000
    assert b.tolist() == want


def test_a_graph_without_translations_is_unchanged_and_says_so(compiled):
    def forward(x):
        return (x @ x).relu()

    x = torch.randn(4, 4)
    result, (report,) = compiled(forward, x)

    assert torch.equal(result, forward(x))
    assert (report.translations_found, report.translation_nodes) == (0, 0)
    assert report.summary().startswith("nothing to hoist")


@pytest.mark.parametrize("n", [0, 1, 2, 8, 64])
def test_every_size_writes_its_rows(compiled, make_mapping, make_caches, oracle, n):
    caches, before = make_caches(2), make_caches(2)
    mapping, k = make_mapping(), rows(n)
    loc = torch.randperm(95, generator=torch.Generator().manual_seed(n))[:n] + 1

    def forward(mapping, loc, k):
        for cache in caches:
            store_kv(*cache, k, k, translate_loc(mapping, loc))

    _, (report,) = compiled(forward, mapping, loc, k)

    assert (report.translations_found, report.translation_nodes) == (2, 1)
    ids = oracle.translate(mapping, loc)
    for cache, old in zip(caches, before, strict=True):
        oracle.same_rows(cache[0], oracle.store(old[0], ids, k))


def test_one_dynamic_graph_serves_every_size(compiled, make_mapping, make_caches, oracle):
    import swa_compile

    mapping = make_mapping()
    caches = make_caches(3)

    def forward(mapping, loc, k):
        for cache in caches:
            store_kv(*cache, k, k, translate_loc(mapping, loc))

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        call = torch.compile(forward, backend="swa_eager", dynamic=True, fullgraph=True)
        for n in (8, 5, 3, 17):
            before = [cache[0].clone() for cache in caches]
            loc = torch.randperm(95, generator=torch.Generator().manual_seed(n))[:n] + 1
            call(mapping, loc, rows(n))
            ids = oracle.translate(mapping, loc)
            for cache, old in zip(caches, before, strict=True):
                oracle.same_rows(cache[0], oracle.store(old, ids, rows(n)))
    assert len(reports) == 1 and reports[0].translation_nodes == 1


def test_captured_values_are_live_not_constants(compiled, make_mapping, make_caches, oracle):
    """The mapping is an operand: edited in place or replaced, the next call sees it."""
    caches, k = make_caches(1), rows(5)

    def forward(mapping, loc, k):
        store_kv(*caches[0], k, k, translate_loc(mapping, loc))

    torch._dynamo.reset()
    with torch.no_grad():
        call = torch.compile(forward, backend="swa_eager", fullgraph=True)
        mapping = make_mapping()
        call(mapping, LOC, k)
        for change in ("edit", "replace"):
            old = caches[0][0].clone()
            if change == "edit":
                mapping[90], mapping[41] = 23, 22
            else:
                mapping = make_mapping(9)
            call(mapping, LOC, k * 2)
            oracle.same_rows(caches[0][0], oracle.store(old, oracle.translate(mapping, LOC), k * 2))


def test_each_gpu_keeps_the_values_of_the_prologue_that_lie_on_it():
    """A kernel runs on one of them. No GPU is needed: the tensors are fake."""
    from torch._subclasses import FakeTensorMode

    from swa_compile.passes.hoist import Prologue
    from swa_compile.passes.materialize import materialize

    aten, mode, graph = torch.ops.aten, FakeTensorMode(), torch.fx.Graph()
    values = []
    for i in (0, 1):
        values.append(graph.placeholder(f"ids{i}"))
        with mode:
            values[i].meta["val"] = torch.empty(4, dtype=torch.int64, device=f"cuda:{i}")
    prologue = Prologue.of(graph)
    emit = prologue.emitter(graph)
    moved = [emit.call(aten.add.Tensor, value, 1) for value in values]
    seen = [emit.call(aten.slice.Tensor, value, 0, 1) for value in moved]
    prologue.close(emit)
    used = [graph.call_function(aten.neg.default, (value,)) for value in (*moved, *seen)]
    graph.output(tuple(used))

    assert materialize(graph, prologue) == 2
    graph.lint()
    calls = graph.find_nodes(op="call_function", target=torch.ops.swa.materialize_all.default)
    assert [call.args[0] for call in calls] == [[moved[0]], [moved[1]]]
    # What uses the values, views of them included, uses those that were kept.
    for node in used:
        source = node.args[0]
        while source.target is aten.slice.Tensor:
            source = source.args[0]
        assert source.args[0] in calls
