"""What a recording has of cuBLAS stays where it was, whatever torch and others do to workspaces."""

import gc

import pytest
import torch

from swa_compile.bench.graphs import captured
from swa_compile.blas_workspace import holds_workspace, stream_to_record_on
from swa_compile.recording import CudaRecorder

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def product():
    """Few rows, a long sum: cuBLAS splits it and adds the parts up in its workspace."""
    g = torch.Generator(DEVICE).manual_seed(0)
    a, b = torch.randn(16, 8192, device=DEVICE, generator=g), torch.randn(8192, 2048, device=DEVICE)
    a, b = a.bfloat16(), b.bfloat16()
    a @ b  # a handle is not made during a recording
    return lambda: [a @ b]


def take_back_workspaces():
    """As torch's cudagraph trees do around each of their recordings."""
    torch._C._cuda_clearCublasWorkspaces()


def fill_free_memory():
    """What was unmapped faults; what was given to others is written over."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.full((1 << 20,), 7.0, device=DEVICE) for _ in range(64)]


def assert_replays_give(want, replays, others):
    """Each replay writes `want` to its output, and nothing to memory that others were given."""
    for replay, out in replays:
        out.zero_()
        replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    assert all(bool((other == 7).all()) for other in others)


def test_a_recording_outlives_the_graph_that_used_its_stream_first(product):
    """The stream's workspace lay in the pool of that graph."""
    first = CudaRecorder(DEVICE)
    first.record(product)
    second = CudaRecorder(DEVICE)
    second._side = first._side  # as the 33rd stream is the first again
    replay, (out,) = second.record(product)
    want = product()[0].clone()
    del first
    take_back_workspaces()
    others = fill_free_memory()
    assert_replays_give(want, [(replay, out)] * 3, others)


def test_a_stream_with_a_workspace_of_somebody_else_is_not_recorded_on(product):
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        product()
    if holds_workspace(stream):
        pytest.skip("this torch makes a workspace for each recorded product")
    recorder = CudaRecorder(DEVICE)
    recorder._side = stream
    recorder.record(product)
    assert recorder._side != stream and holds_workspace(recorder._side)


def test_a_workspace_that_was_taken_back_returns_to_its_place(product):
    """Recordings of before and after use one memory, which nobody else is given."""
    stream = stream_to_record_on(DEVICE)
    if not holds_workspace(stream):
        pytest.skip("this torch makes a workspace for each recorded product")
    recorder = CudaRecorder(DEVICE)
    before, (one,) = recorder.record(product)
    take_back_workspaces()
    others = fill_free_memory()
    after, (two,) = recorder.record(product)
    want = product()[0].clone()
    assert_replays_give(want, [(before, one), (after, two), (before, one)], others)


def test_steps_of_the_benchmark_outlive_those_of_the_row_before(product):
    """A row of the benchmark faulted where cudagraph trees were measured in a second row."""
    first = captured(product)
    del first
    gc.collect()
    step = captured(product)
    want = product()[0].clone()
    take_back_workspaces()
    others = fill_free_memory()
    assert_replays_give(want, [(step, *step())], others)
