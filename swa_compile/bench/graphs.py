"""A step as the replay of one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from swa_compile.blas_workspace import stream_to_record_on

T = TypeVar("T")


def captured(step: Callable[[], T]) -> Callable[[], T]:
    """`step`, captured on the current device; its result is overwritten by each replay.

    Three calls on a side stream come first, as the capture wants them.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    stream = stream_to_record_on(device)  # other variants make torch take back workspaces
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()

    def replay() -> T:
        graph.replay()
        return out

    return replay
