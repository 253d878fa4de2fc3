"""Streams to record on whose cuBLAS workspace stays where a recording has found it.

torch keeps a workspace of matrix products for each stream, in memory of whoever used the stream
first, and hands a process 32 streams in turn. A recording has the address for good. torch takes it
back when cudagraph trees record, and in some versions when any graph of that stream is dropped
(pytorch issue 193402); if it lay in the pool of a graph that is gone, the memory is unmapped
and given to others, and the next replay faults or writes over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# In a torch that makes a workspace for each recorded product, no stream ever has one.
_TRIES = 4


@dataclass(frozen=True)
class Pool:
    """A private pool of the caching allocator. `keeper` is a graph in it: it keeps the id valid."""

    id: Any
    keeper: torch.cuda.CUDAGraph


def stream_to_record_on(device: torch.device) -> torch.cuda.Stream:
    """A stream of `device` that `holds_workspace`, if that can be had."""
    for _ in range(_TRIES):
        stream = torch.cuda.Stream(device)
        if holds_workspace(stream):
            break
    return stream


def holds_workspace(stream: torch.cuda.Stream) -> bool:
    """Whether the workspace of `stream` is in memory that stays for good, and is used for it alone.

    It is put there if the stream has none: the first one, or, after torch took that one back, the
    same memory again. So recordings of before agree with those that follow. The workspace is that
    of the calling thread's handle: record in the thread that asked.
    """
    pool = _workspaces(stream.device_index, stream.cuda_stream)
    with (
        torch.cuda.stream(stream),
        torch.cuda.use_mem_pool(pool, stream.device),  # type: ignore[arg-type]
    ):
        torch.cuda.current_blas_handle()
    blocks = (
        block for segment in torch.cuda.memory_snapshot(pool.id) for block in segment["blocks"]
    )
    return any(block["state"] == "active_allocated" for block in blocks)


@cache
def _workspaces(device: int, stream: int) -> Pool:
    """The pool of one stream's workspace. torch has these for the process; so this is kept, too."""
    keeper, handle = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(
            keeper,
            pool=handle,
            stream=torch.cuda.ExternalStream(stream, device),
            capture_error_mode="thread_local",
        ),
    ):
        torch.zeros(1, device="cuda")
    return Pool(handle, keeper)
