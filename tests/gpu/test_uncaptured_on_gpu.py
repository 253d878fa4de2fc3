"""What is run uncaptured on a GPU, for which reason, and what is refused."""

import re
import threading
import warnings

import pytest
import torch

import swa_compile
from swa_compile.cudagraphs import CaptureUseError

pytestmark = pytest.mark.usefixtures("fresh")


@torch.library.custom_op("swa_gpu_test::syncs", mutates_args=())
def syncs(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().amax() > -1)  # reads a value on the host


@syncs.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_failed_capture_is_named_and_leaves_the_allocator_and_the_generators():
    """Rows B41 and B44: an operator that synchronizes cannot be recorded."""

    def forward(x):
        return torch.sin(syncs(x) + 1)

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    x = torch.randn(8, device="cuda")
    with torch.no_grad():
        compiled(x)
        with pytest.warns(UserWarning, match="CAPTURE_SKIPPED"):
            got = compiled(x)
        torch.testing.assert_close(got, torch.sin(x + 1))
        torch.testing.assert_close(compiled(x), torch.sin(x + 1))
        # All of these fail where a capture is believed to go on.
        torch.rand(4, device="cuda")
        torch.empty(1 << 26, device="cuda")
        torch.cuda.empty_cache()
        other = torch.compile(lambda x: x.cos(), backend="swa", options={"cudagraphs": "full"})
        for _ in range(3):
            torch.testing.assert_close(other(x), x.cos())
        strict = torch.compile(
            lambda x: syncs(x) * 2, backend="swa", options={"cudagraphs": "full", "strict": True}
        )
        strict(x)
        with pytest.raises(swa_compile.HoistError, match="CAPTURE_SKIPPED"):
            strict(x)


def test_an_operator_that_cannot_be_captured_is_cut_out():
    def forward(x):
        return torch.sin(syncs(torch.cos(x)) + 1)

    options = {"cudagraphs": "piecewise", "split_ops": ["swa_gpu_test::syncs"]}
    compiled = torch.compile(forward, backend="swa", options=options)
    with torch.no_grad(), swa_compile.collect() as reports:
        for _ in range(5):
            x = torch.randn(64, device="cuda")
            torch.testing.assert_close(compiled(x), torch.sin(torch.cos(x) + 1))
    assert reports[0].captures.pieces == 2
    assert reports[0].captures.replays == 4


def test_a_cpu_tensor_is_reported_with_name_and_line_and_its_value_is_used():
    """Rows B44 and B45."""

    def forward(x, scale):
        return x * scale

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    with (
        torch.no_grad(),
        swa_compile.collect() as reports,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for value in (2.0, 3.0, 4.0):
            x = torch.randn(8, device="cuda")
            torch.testing.assert_close(compiled(x, torch.tensor(value)), x * value)
    (text,) = [str(w.message) for w in warned if "CAPTURE_SKIPPED" in str(w.message)]
    assert re.search(r"test_uncaptured_on_gpu.py:\d+: .*scale is a tensor", text)
    (skip,) = reports[0].captures.skipped
    assert skip.argument == "scale" and skip.source


def test_another_stream_and_a_second_thread_are_refused():
    compiled = torch.compile(lambda x: x * 2, backend="swa", options={"cudagraphs": "full"})
    x = torch.ones(8, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(CaptureUseError, match="another stream"):
            compiled(x)
        result = []

        def call():
            with torch.no_grad():
                result.append(compiled(x))

        thread = threading.Thread(target=call)  # one after the other is fine
        thread.start()
        thread.join()
    assert result[0].tolist() == [2.0] * 8


def test_captured_inside_a_graph_of_the_callers():
    compiled = torch.compile(lambda x: x * 2 + 1, backend="swa")
    x = torch.ones(8, device="cuda")
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        x.fill_(5)
        graph.replay()
    assert out.tolist() == [11.0] * 8
