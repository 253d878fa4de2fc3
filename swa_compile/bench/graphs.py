"""A step as the replay of one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(step: Callable[[], T]) -> Callable[[], T]:
    """`step`, captured on the current device; its result is overwritten by each replay.

    Three calls on a side stream come first, as the capture wants them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> T:
        graph.replay()
        return out

    return replay
