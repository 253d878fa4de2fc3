"""What records work on a device and repeats it: CUDA graphs, behind a small interface.

`swa_compile.cudagraphs` decides what is recorded, at which addresses, and when a recording may be
repeated. It reaches the device through a `Recorder` alone, so that those decisions are tested on
the CPU with a recorder that runs the same function again on the same tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swa_compile.blas_workspace import Pool, holds_workspace, stream_to_record_on
from swa_compile.inductor import borrowed, end_failed_capture, profiler_is_on

T = TypeVar("T")


class CaptureError(RuntimeError):
    """Work could not be recorded; nothing of it was executed."""


class Recorder(Protocol):
    """Records and repeats the work of one captured graph."""

    device: torch.device

    def busy(self) -> bool:
        """Whether the caller is recording on the current stream already."""

    def stream(self) -> Hashable:
        """The current stream."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what `run` launches, without executing it: (repeat it, what `run` returned).

        Raises:
            CaptureError: where that cannot be recorded.
        """

    def borrow(self, tensor: Tensor) -> Tensor:
        """`tensor`, without keeping its memory from being reused by later recordings."""

    def islands(self, bucket: Hashable) -> AbstractContextManager[None]:
        """Allocate from a pool of `bucket`: the same allocations get the same addresses again."""

    def memory(self) -> int:
        """Bytes that recordings and islands hold."""

    def current(self) -> AbstractContextManager[None]:
        """With the device current, that launches by the operators' own code go to."""

    def profiled(self) -> bool:
        """Whether a profiler listens, for which it is worth while to give names to replays."""


def recorder_for(device: torch.device) -> Recorder | None:
    """A recorder for a graph on `device`; None where nothing can be recorded."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """CUDA graphs in one memory pool, recorded on one side stream.

    All buckets share the pool. That is sound because what a graph leaves in it is read in the same
    call only, and graphs of one bucket are repeated in the order in which they were recorded.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._islands: dict[Hashable, Pool] = {}

    # Made at the first recording: a compilation, in which tensors may be fake, makes the recorder.

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        # The allocator hands a block to the stream that it was made for, so that pieces share
        # memory only when they are recorded on the same one.
        return stream_to_record_on(self.device)

    @cached_property
    def _graphs(self) -> Pool:
        return self._pool()

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> Hashable:
        return torch.cuda.current_stream(self.device).cuda_stream

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs.id
        if not holds_workspace(self._side):
            self._side = stream_to_record_on(self.device)  # somebody else's, since the last time
        return graph.replay, self._capture(graph, pool, run)

    def borrow(self, tensor: Tensor) -> Tensor:
        return borrowed(tensor)

    def islands(self, bucket: Hashable) -> AbstractContextManager[None]:
        pool = self._islands.get(bucket)
        if pool is None:
            pool = self._islands[bucket] = self._pool()
        return torch.cuda.use_mem_pool(pool, self.device)  # type: ignore[arg-type]

    def memory(self) -> int:
        if "_graphs" not in vars(self):
            return 0
        pools = [self._graphs, *self._islands.values()]
        return sum(
            segment["total_size"]
            for pool in pools
            for segment in torch.cuda.memory_snapshot(pool.id)
        )

    def current(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.device)

    def profiled(self) -> bool:
        return profiler_is_on()

    def _pool(self) -> Pool:
        handle, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        self._capture(keeper, handle, self._launch_something)
        return Pool(handle, keeper)

    def _launch_something(self) -> None:
        torch.zeros(1, device=self.device)

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], T]) -> T:
        with torch.cuda.device(self.device), _no_garbage_collection():
            torch.cuda.synchronize()
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException as error:
                    self._abandon(graph, pool)
                    if isinstance(error, Exception) and not isinstance(error, CaptureError):
                        raise CaptureError(_first_line(error)) from error
                    raise
                try:
                    graph.capture_end()
                except Exception as error:
                    self._abandon(graph, pool, ended=True)
                    raise CaptureError(_first_line(error)) from error
            torch.cuda.current_stream().wait_stream(self._side)
        return result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any, ended: bool = False) -> None:
        """Leave the allocator and the random generators as if nothing had been recorded."""
        if not ended:
            try:
                graph.capture_end()
            except Exception:
                ended = True
        if not ended:
            return
        assert self.device.index is not None
        end_failed_capture(self.device.index, pool)
        # A recording that fails leaves the generator believing that it goes on. One that
        # succeeds ends that.
        again = torch.cuda.CUDAGraph()
        with suppress(Exception):
            again.capture_begin(capture_error_mode="thread_local")
            self._launch_something()
            again.capture_end()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection frees might call the driver in the middle of a recording."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
