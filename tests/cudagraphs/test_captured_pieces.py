"""One graph in pieces, no compiler: x -> piece 0 -> island -> piece 1 -> island -> piece 2."""

import pytest
import torch

from swa_compile.bucket import Inputs, Sizes
from swa_compile.cudagraphs import CapturedGraph
from swa_compile.pieces import Piece

from .recorder import FakeRecorder


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
