"""What is recorded, at which addresses, and when it may be repeated: one graph, no compiler."""

import torch

from swa_compile.addresses import LARGE
from swa_compile.bucket import Inputs, Sizes

from .stored_rows import ROWS, inputs, make, store


def test_the_first_meeting_runs_the_second_records_the_third_repeats(recorder):
    graph, cache, rows = make(recorder), torch.zeros(ROWS, 4), torch.zeros(ROWS, 4)
    for call, (recorded, replayed) in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        args = inputs(call, cache)
        want = store([rows, *args[1:]])
        got = graph(list(args))
        assert (recorder.recordings, recorder.replays) == (recorded, replayed)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert got[2] is cache and got[3:] == [None, 5]
        assert torch.equal(cache, rows)
    assert graph.captures.captures == 1
    assert (graph.captures.uncaptured, graph.captures.replays) == (1, 3)


def test_outputs_are_the_callers_own(recorder):
    graph, cache = make(recorder), torch.zeros(ROWS, 4)
    kept = []
    for call in range(5):
        args = inputs(call, cache)
        kept.append((graph(list(args))[1], args[2] * 2))
    for got, want in kept:
        assert torch.equal(got, want)
    got = kept[-1][0]
    got.fill_(9)
    args = inputs(7, cache)
    assert torch.equal(graph(list(args))[1], args[2] * 2)


def test_an_output_that_is_a_view_of_an_input_is_one_of_the_callers_input(recorder):
    def run(values):
        cache, x = values
        return [cache[2:4], x[:, 1], x.t()]

    graph, cache = make(recorder, run), torch.arange(12.0).view(6, 2)
    for _ in range(4):
        x = torch.randn(3, 5)
        rows, column, turned = graph([cache, x])
        assert rows.data_ptr() == cache[2:4].data_ptr()
        assert torch.equal(column, x[:, 1]) and torch.equal(turned, x.t())
        # Also where the graph reads a copy.
        assert column.data_ptr() == x[:, 1].data_ptr()


def test_small_inputs_that_move_are_copied_and_those_that_stay_are_not(recorder):
    graph, cache = make(recorder), torch.zeros(ROWS, 4)
    steady = inputs(0, cache)
    for _ in range(5):
        graph(list(steady))
    assert graph.captures.copied_inputs == 0
    kept = []
    for call in range(1, 5):
        args = inputs(call, cache)
        kept.append(args)  # so that no address comes twice
        assert torch.equal(graph(list(args))[1], args[2] * 2)
    # The first that moves renews the recording; from then on both are copied.
    assert graph.captures.recaptured == 1
    assert graph.captures.copied_inputs == 8


def test_a_replaced_cache_renews_the_recording_and_the_old_one_is_left_alone(recorder):
    """Rows B46 and B51."""
    graph, old = make(recorder), torch.zeros(ROWS, 4)
    batches = [inputs(call, old) for call in range(6)]  # kept: no address comes twice
    for args in batches[:3]:
        graph(list(args))
    before, new, rows = old.clone(), torch.ones(ROWS, 4), torch.ones(ROWS, 4)
    for _, loc, k in batches[3:]:
        store([rows, loc, k])
        graph([new, loc, k])
        assert torch.equal(new, rows)
    assert torch.equal(old, before)
    assert graph.captures.recaptured == 1
    assert graph.captures.copied_inputs == 2 * 5  # never the cache


def test_a_cache_that_is_gone_is_not_kept_alive(recorder):
    recorder.record = lambda run: (lambda: None, run())  # that of the CPU keeps what it repeats
    graph = make(recorder, lambda values: [values[2] * 2])
    cache = torch.zeros(ROWS, 4)
    storage = torch.multiprocessing.reductions.StorageWeakRef(cache.untyped_storage())
    for call in range(3):
        graph(inputs(call, cache))
    del cache
    assert storage.expired()


def test_large_inputs_are_bound_and_copied_once_they_move_for_the_second_time(recorder):
    weight = [torch.full((LARGE // 4 + 1,), float(i)) for i in range(5)]
    graph = make(recorder, lambda v: [v[0] + v[1][:4]], inputs=Inputs())
    x, copied = torch.ones(4), []
    for i in (0, 0, 0, 1, 1, 2, 3, 4):
        (out,) = graph([x, weight[i]])
        assert out.tolist() == [i + 1.0] * 4
        copied.append(graph.captures.copied_inputs)
    assert graph.captures.recaptured == 2
    assert copied == [0, 0, 0, 0, 0, 1, 2, 3]


def test_sizes_strides_and_numbers_have_recordings_of_their_own(recorder):
    graph = make(recorder, lambda v: [v[0] * v[1]], inputs=Inputs())
    x = torch.randn(4, 4)
    for _ in range(3):
        for value, factor in ((x, 2), (x.t(), 2), (x, 3), (x[:2], 3), (x.double(), 3)):
            assert torch.equal(graph([value, factor])[0], value * factor)
    assert graph.captures.captures == 5
    assert len(graph.captures.memory) == 5
    assert set(graph.captures.memory.values()) == {1000}


def test_expanded_inputs_are_copied_too(recorder):
    graph = make(recorder, lambda v: [v[0] + 1], inputs=Inputs())
    keep = []
    for i in range(4):
        keep.append(torch.full((1, 3), float(i)))
        assert torch.equal(graph([keep[-1].expand(5, 3)])[0], torch.full((5, 3), i + 1.0))
    assert graph.captures.replays == 3


def test_a_small_input_in_the_storage_of_a_written_one_is_bound(recorder):
    def run(values):
        whole, part = values
        whole.add_(1)
        return [part + 0]

    graph = make(recorder, run, inputs=Inputs(written=frozenset({0})))
    keep = []
    for i in range(4):
        keep.append(torch.full((6,), float(i)))
        assert graph([keep[-1], keep[-1][2:4]])[0].tolist() == [i + 1.0] * 2
    assert graph.captures.copied_inputs == 0
    assert graph.captures.recaptured == 2


def test_the_record_is_json_and_reads_well(recorder):
    import json

    graph = make(recorder)
    cache = torch.zeros(ROWS, 4)
    batches = [inputs(call, cache) for call in range(3)]
    for args in batches:
        graph.sizes = Sizes(3)
        graph(list(args))
    assert json.loads(json.dumps(graph.captures.to_dict()))["memory"] == {"3 tokens": 1000}
    assert graph.captures.summary().startswith("1 CUDA graphs of 1 sizes")
