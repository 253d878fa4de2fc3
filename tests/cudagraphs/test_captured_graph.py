"""What is recorded, at which addresses, and when it may be repeated: one graph, no compiler."""

import threading

import pytest
import torch

from swa_compile.addresses import LARGE
from swa_compile.bucket import Inputs, Sizes
from swa_compile.cudagraphs import CapturedGraph, CaptureUseError
from swa_compile.passes import HoistError
from swa_compile.pieces import Piece

from .recorder import FakeRecorder

ROWS = 10


def store(values):
    """Writes rows of the cache (place 0), and returns what it read before and some more."""
    cache, loc, k = values
    values.clear()
    before = cache[loc].clone()
    cache[loc] = k
    return [before, k * 2, cache, None, 5]


def inputs(seed, cache):
    g = torch.Generator().manual_seed(seed)
    loc = torch.randperm(ROWS - 1, generator=g)[:3] + 1
    return [cache, loc, torch.randn(3, 4, generator=g)]


def make(recorder, run=store, **options):
    options.setdefault("inputs", Inputs(written=frozenset({0}), names=["k_cache", "loc", "k"]))
    return CapturedGraph(run, recorder, **options)


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


@pytest.mark.parametrize("n", [0, 3])
def test_no_tokens_run_as_they_are(recorder, n):
    graph = make(recorder, lambda v: [v[0] + 1], inputs=Inputs())
    for _ in range(3):
        graph.sizes = Sizes(n)
        assert graph([torch.ones(n)])[0].shape == (n,)
    assert recorder.recordings == (1 if n else 0)


def test_sizes_outside_capture_sizes_are_counted_and_not_recorded(recorder):
    graph = make(recorder, lambda v: [v[0] + 1], inputs=Inputs(), capture_sizes=[4], strict=True)
    for n in (4, 5, 4, 5, 4, 5):
        graph.sizes = Sizes(n)
        graph([torch.ones(n)])
    assert (graph.captures.captures, graph.captures.replays, graph.captures.uncaptured) == (1, 2, 4)
    (skip,) = graph.captures.skipped
    assert (skip.code, skip.tokens) == ("CAPTURE_SKIPPED", 5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_cpu_tensor_is_named_with_its_line(recorder, strict):
    """Rows B44 and B45: a graph would read its value once and for all."""
    known = Inputs(names=["x", "batch.scale"], sources=["model.py:3", "model.py:7"])
    graph = make(recorder, lambda v: [v[0] * 2], inputs=known, strict=strict)
    other = torch.empty(1, device="meta")
    graph([torch.ones(3), other])
    if strict:
        with pytest.raises(HoistError, match=r"CAPTURE_SKIPPED at model.py:7: .*batch.scale"):
            graph([torch.ones(3), other])
        return
    with pytest.warns(UserWarning, match=r"model.py:7: .*batch.scale is a tensor on meta"):
        graph([torch.ones(3), other])
    assert graph([torch.ones(3), other])[0].tolist() == [2.0] * 3
    assert (recorder.recordings, graph.captures.uncaptured) == (0, 3)
    (skip,) = graph.captures.skipped
    assert (skip.argument, skip.source) == ("batch.scale", "model.py:7")


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_recording_leaves_the_caches_and_runs_uncaptured(strict):
    def fail(number):
        raise RuntimeError("operation not permitted when stream is capturing")

    graph, cache, rows = make(FakeRecorder(fail=fail), strict=strict), *torch.zeros(2, ROWS, 4)
    for call in range(3):
        args = inputs(call, cache)
        if strict and call == 1:
            with pytest.raises(HoistError, match=r"CAPTURE_SKIPPED: .*not permitted"):
                graph(list(args))
            assert torch.equal(cache, rows)
            return
        if call == 1:
            with pytest.warns(UserWarning, match=r"runs uncaptured.*not permitted"):
                graph(list(args))
        else:
            graph(list(args))
        store([rows, *args[1:]])
        assert torch.equal(cache, rows)
    assert graph.captures.uncaptured == 3


def test_inside_a_capture_of_the_callers_it_runs_as_it_is(recorder):
    graph, cache = make(recorder), torch.zeros(ROWS, 4)
    for call in range(3):
        recorder.capturing = True
        graph(inputs(call, cache))
    assert recorder.recordings == 0


def test_another_stream_is_refused_ahead_of_any_write(recorder):
    graph, cache = make(recorder), torch.zeros(ROWS, 4)
    for call in range(3):
        graph(inputs(call, cache))
    recorder.current_stream, before = 1, cache.clone()
    with pytest.raises(CaptureUseError, match="another stream"):
        graph(inputs(4, cache))
    assert torch.equal(cache, before)
    recorder.current_stream = 0
    graph(inputs(4, cache))


def test_a_second_thread_during_a_call_is_refused(recorder):
    refused, entered, leave = [], threading.Event(), threading.Event()

    def run(values):
        entered.set()
        assert leave.wait(10)
        return [values[0] + 1]

    graph = make(recorder, run, inputs=Inputs())
    first = threading.Thread(target=lambda: graph([torch.ones(2)]))
    first.start()
    assert entered.wait(10)
    try:
        graph([torch.ones(2)])
    except CaptureUseError as error:
        refused.append(error)
    leave.set()
    first.join()
    assert "one thread at a time" in str(refused[0])
    # One after the other they may call it.
    result = []
    second = threading.Thread(target=lambda: result.append(graph([torch.ones(2)])[0]))
    second.start()
    second.join()
    assert result[0].tolist() == [2.0, 2.0]


# In pieces: x -> piece 0 -> island -> piece 1 -> island -> piece 2


def in_pieces(island, recorder=None, **options):
    recorder = FakeRecorder() if recorder is None else recorder

    def first(args):
        x, cache, _ = args
        args.clear()
        cache[1:3] = x[:2]
        return x * 2, x.sum(), cache

    def middle(args):
        y, total, cache, _ = args
        args.clear()
        y.add_(total)  # written in place, as Inductor reuses a buffer
        cache[3] = y[0]
        return y, cache, total

    def last(args):
        y, total = args
        args.clear()
        return (y - total,)

    pieces = [Piece(i, run) for i, run in enumerate((first, middle, last))]

    def run(values):
        x, cache, n = values
        values.clear()
        y, total, cache = pieces[0]([x, cache, n])
        z = island(y)
        del y
        z, cache, total = pieces[1]([z, total, cache, n])
        w = island(z)
        del z
        (out,) = pieces[2]([w, total])
        return [out, w.clone()]  # `Steady` uses its memory again

    inputs = Inputs(written=frozenset({1}))
    options.setdefault("mode", "piecewise")
    return CapturedGraph(run, recorder, pieces=pieces, inputs=inputs, **options), recorder


def expected(x, rows, island):
    rows[1:3] = x[:2]
    z = island(x * 2) + x.sum()
    rows[3] = z[0]
    w = island(z)
    return w - x.sum(), w


def steps(graph, island, calls, cache, rows, sizes=(4,)):
    kept = []
    for call in range(calls):
        x = torch.randn(sizes[call % len(sizes)], 3)
        want = expected(x, rows, island)
        got = graph([x, cache, x.shape[0]])
        kept.append((x, got, want))
        torch.testing.assert_close(cache, rows)
    for _, got, want in kept:
        torch.testing.assert_close(tuple(got), want)


class Steady:
    """An eager operator whose outputs come to the same addresses again and again."""

    def __init__(self):
        self.memory = {}

    def __call__(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        out = self.memory.setdefault((self.calls % 2, x.shape), torch.empty_like(x))
        return out.copy_(x.sin())


def test_pieces_are_recorded_each_and_need_no_copies_where_addresses_are_steady():
    """Row B40: values made in an eager island feed later recordings."""
    graph, recorder = in_pieces(Steady())
    cache, rows = torch.zeros(2, 6, 3)
    steps(graph, torch.sin, 6, cache, rows)
    captures = graph.captures
    assert (captures.captures, captures.recaptured) == (3, 0)
    assert recorder.replays == 3 * 5
    assert captures.copied_inputs == 5  # x, once a call and not once a piece
    assert len(set(recorder.island_keys)) == 1


def test_islands_whose_outputs_move_are_copied_in_the_end():
    keep = []

    def island(x):
        keep.append(x.sin())  # a new address each time
        return keep[-1]

    graph, _ = in_pieces(island)
    cache, rows = torch.zeros(2, 6, 3)
    steps(graph, torch.sin, 12, cache, rows)
    captures = graph.captures
    # Each of the two islands' outputs may move twice before it is copied.
    assert captures.recaptured == 4
    before = captures.copied_inputs
    steps(graph, torch.sin, 3, cache, rows)
    assert captures.copied_inputs - before == 3 * 3
    assert captures.recaptured == 4


def test_several_sizes_in_pieces_keep_to_themselves():
    """Row B39."""
    graph, _ = in_pieces(Steady())
    cache, rows = torch.zeros(2, 6, 3)
    steps(graph, torch.sin, 9, cache, rows, sizes=(4, 8, 4))
    assert graph.captures.captures == 6


def test_a_replaced_cache_renews_all_pieces():
    graph, _ = in_pieces(Steady())
    old, rows = torch.zeros(2, 6, 3)
    steps(graph, torch.sin, 3, old, rows)
    before, (new, rows) = old.clone(), torch.zeros(2, 6, 3)
    steps(graph, torch.sin, 3, new, rows)
    assert torch.equal(old, before)
    assert (graph.captures.captures, graph.captures.recaptured) == (6, 1)


def test_a_piece_that_cannot_be_recorded_runs_between_those_that_can():
    def fail(number):
        if number in (1, 4):
            raise RuntimeError("not here")

    island = Steady()
    graph, _ = in_pieces(island, FakeRecorder(fail=fail))
    cache, rows = torch.zeros(2, 6, 3)
    with pytest.warns(UserWarning, match=r"piece 1 runs uncaptured: .*not here"):
        steps(graph, torch.sin, 5, cache, rows)
    assert graph.captures.captures == 2 * (1 + graph.captures.recaptured)
    assert graph.captures.replays == 4


def test_a_piece_whose_sizes_depend_on_data_runs_uncaptured_and_the_others_do_not():
    """No replay at the sizes of an earlier call."""

    def island(x):
        return x[: 2 + int(x[0, 0] > 0)].contiguous()

    pieces = [
        Piece(0, lambda args: (args[0] * 2,)),
        Piece(1, lambda args: (args[0].sum(0), args[1] + 1)),
        Piece(2, lambda args: (args[0] * 3,)),
    ]

    def run(values):
        (y,) = pieces[0]([*values])
        z = island(y)
        total, n = pieces[1]([z, z.shape[0]])
        (out,) = pieces[2]([total])
        return [out, n]

    graph = CapturedGraph(run, FakeRecorder(), pieces=pieces, mode="piecewise")

    def several_calls():
        for call in range(10):
            x = torch.randn(4, 3)
            x[0, 0] = x[0, 0].abs() * (1 if call % 2 else -1)
            out, n = graph([x])
            rows = 2 + call % 2
            torch.testing.assert_close(out, (x * 2)[:rows].sum(0) * 3)
            assert n == rows + 1

    with pytest.warns(UserWarning, match=r"piece 1 runs uncaptured: its sizes depend on data"):
        several_calls()
    assert graph.captures.replays == 9


def test_auto_records_decode_whole_and_the_rest_in_pieces():
    graph, recorder = in_pieces(Steady(), mode="auto")
    cache, rows = torch.zeros(2, 6, 3)
    graph.sizes = Sizes(4, decode=True)
    steps(graph, torch.sin, 4, cache, rows)
    assert (recorder.recordings, graph.captures.full_replays) == (1, 3)
    graph.sizes = Sizes(4, decode=False)
    steps(graph, torch.sin, 4, cache, rows)
    assert (recorder.recordings, graph.captures.full_replays) == (4, 3)


def test_auto_falls_back_to_pieces_where_the_whole_cannot_be_recorded():
    def fail(number):
        if number == 0:
            raise RuntimeError("an attention that plans on the host")

    graph, _ = in_pieces(Steady(), FakeRecorder(fail=fail), mode="auto")
    cache, rows = torch.zeros(2, 6, 3)
    graph.sizes = Sizes(4, decode=True)
    with pytest.warns(UserWarning, match=r"captured in pieces.*plans on the host"):
        steps(graph, torch.sin, 4, cache, rows)
    assert (graph.captures.captures, graph.captures.full_replays) == (3, 0)


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
