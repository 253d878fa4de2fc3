"""What is run uncaptured, for which reason, and what is refused: one graph, no compiler."""

import threading

import pytest
import torch

from swa_compile.bucket import Inputs, Sizes
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.passes import HoistError

from .recorder import FakeRecorder
from .stored_rows import ROWS, inputs, make, store


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
