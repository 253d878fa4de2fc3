"""`BucketRunner`: forwards of any size, padded to a few sizes that are captured ahead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from swa_compile.cudagraphs import CapturedGraph, CaptureUseError, uncaptured, watching
from swa_compile.kv import ForwardBatch
from swa_compile.padding import Arguments, Form, StaticInputs
from swa_compile.recording import recorder_for
from swa_compile.sizes import mark_sizes
from swa_compile.whole_call import WholeCall

_NO_CALL = object()


@dataclass
class BucketUse:
    """What one bucket was used for.

    Attributes:
        tokens, requests: what batches are padded to; requests is None where inputs have none.
        calls: batches that ran in it; without the runs that captured it.
        padding: rows of padding in those, over all calls.
        buffer_bytes: of the static inputs.
        graph_bytes: of memory pools, as far as capturing this bucket made them grow.
    """

    tokens: int
    requests: int | None
    calls: int = 0
    padding: int = 0
    buffer_bytes: int = 0
    graph_bytes: int = 0


class BucketRunner:
    """Runs `fn` on batches of any number of tokens, at a few sizes only.

        runner = BucketRunner(torch.compile(model, backend="swa"), [1, 2, 4, 8, 16, 32])
        logits = runner(batch)                       # a ForwardBatch, or keyword tensors

    A batch of N tokens is copied into static inputs of the next size, the bucket; the rest of them
    is cleared, so that padding writes the sink, and nothing of an earlier batch is left. Outputs
    are cut to N again. At the first call all buckets are captured ahead, the largest first, with
    padding alone: no row of a cache but the sink's is written.

    What code compiled by the `swa` backend captures is left to it. Anything else is captured here,
    as a whole, where there is a GPU. Everything works on the CPU, too, without captures.

    Args:
        fn: called with a `ForwardBatch` or with keywords, as the runner is; returns tensors, in
            any nesting. What it reads beside its arguments has to stay where it is, except the
            parameters and buffers of a module, which are looked after: of `fn`, of what it is a
            method of, or of what a `partial` binds.
        capture_sizes: the buckets, in tokens, each at least 1. A batch with more tokens than the
            largest runs as it is, uncaptured and unpadded.
        live: names of inputs that are handed on as they are, neither copied nor padded.
        capture: False where `fn` captures itself in another way (`cudagraphs="inductor"`).
        around: record decode batches (B = N) here even where the code of `fn` captures itself, and
            around all of `fn`: a replay runs nothing of it then, no guards of Dynamo either, so
            that only replaced tensors, submodules and hooks are noticed. Batches that cannot be
            recorded so, and all others, are left to that code.
        dynamic: mark the sizes for `torch.compile`, so that one compilation serves all buckets
            (see `mark_sizes`); False for models that conclude something from a size.
        progress: show a bar while capturing; default: where the standard error is a terminal.

    Raises:
        ValueError: for no sizes, or one below 1. TypeError: for one that is no integer.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        capture_sizes: Sequence[int],
        *,
        live: Sequence[str] = ("full_to_swa_index_mapping",),
        capture: bool = True,
        around: bool = False,
        dynamic: bool = True,
        progress: bool | None = None,
    ) -> None:
        for size in capture_sizes:
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"capture_sizes holds integers; got {size!r}")
            if size < 1:
                raise ValueError(f"capture_sizes holds token counts of at least 1; got {size}")
        if not capture_sizes:
            raise ValueError("capture_sizes is empty; name at least one token count")
        self.capture_sizes = tuple(sorted(set(capture_sizes)))
        self.uncaptured = 0  # batches of more tokens than the largest bucket
        self._fn = fn
        self._live = frozenset(live)
        self._capture = capture
        self._around = around
        self._dynamic = dynamic
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._form: Form | None = None
        self._buckets: dict[tuple[int, int | None], tuple[StaticInputs, BucketUse]] = {}
        self._own: WholeCall | None = None
        self._graphs: list[CapturedGraph] = []
        self._graph_bytes = 0
        self._lock = threading.Lock()
        self._stream: Hashable = _NO_CALL

    @property
    def buckets(self) -> list[BucketUse]:
        """What each bucket was used for, by size."""
        uses = [use for _, use in self._buckets.values()]
        return sorted(uses, key=lambda use: (use.tokens, use.requests or 0))

    @torch.no_grad()
    def __call__(self, batch: ForwardBatch | None = None, /, **tensors: Tensor) -> Any:
        """Run one batch of N tokens (N = 0 too); outputs are cut to its size, and the caller's.

        Args:
            batch: or else keywords. `cu_seqlens_q` has a row for each request and one more;
                `page_table` and `seq_lens` have one for each request; all others, but the `live`
                ones, for each token.

        Raises:
            TypeError: names, dtypes or the way of calling differ from the first call's.
            ValueError: shapes or devices do, or numbers of rows contradict each other.
            CaptureUseError: a second thread or another stream calls.
            Nothing was written then.
        """
        named = self._named(batch, tensors)
        if not self._lock.acquire(blocking=False):
            raise CaptureUseError(
                "a BucketRunner was called while another call of it was running: its static inputs "
                "are one memory; make a runner for each thread"
            )
        try:
            kind = None if batch is None else type(batch)
            form = self._form or Form.of(named, self._live, kind)
            form.check(named, kind)
            self._check_stream(form.device)
            if self._form is None:
                self._form = form
                self._capture_ahead(form, named)
            return self._run(form, named)
        finally:
            self._lock.release()

    def capture(self, batch: ForwardBatch | None = None, /, **tensors: Tensor) -> None:
        """Capture all buckets now, ahead of the first call. Of `batch` only the form matters."""
        named = self._named(batch, tensors)
        kind = None if batch is None else type(batch)
        form = Form.of(named, self._live, kind)
        form.check(named, kind)
        if self._form is not None:
            raise CaptureUseError("this BucketRunner has captured its buckets already")
        self._check_stream(form.device)
        self._form = form
        with torch.no_grad():
            self._capture_ahead(form, named)

    def _named(
        self, batch: ForwardBatch | None, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if batch is None:
            return dict(tensors)
        if tensors:
            raise TypeError("a BucketRunner takes a ForwardBatch or keyword tensors, not both")
        if not isinstance(batch, ForwardBatch):
            raise TypeError(f"expected a ForwardBatch; got {type(batch).__name__}")
        return {field.name: getattr(batch, field.name) for field in fields(batch)}

    def _run(self, form: Form, named: dict[str, Tensor]) -> Any:
        tokens, requests = form.sizes(named)
        padded = next((size for size in self.capture_sizes if size >= tokens), None)
        if padded is None:
            self.uncaptured += 1
            if self._dynamic:
                mark_sizes({name: named[name] for name in form.rows})
            with uncaptured():  # the next such batch lies elsewhere, and has another size
                return self._call(form.arguments(named))
        static, use = self._bucket(form, padded, self._requests(tokens, requests, padded))
        static.fill(named, tokens, requests)
        use.calls += 1
        use.padding += padded - tokens
        return static.cut(self._invoke(static, use, named), tokens, requests)

    def _requests(self, tokens: int, requests: int | None, padded: int) -> int | None:
        """B that a batch is padded to: as N in decode; otherwise a bucket, and never like N."""
        if requests is None or tokens == requests:
            return None if requests is None else padded
        size = next((size for size in self.capture_sizes if size >= requests), requests)
        # Outputs of a row a token could not be told from those of a row a request.
        return size + 1 if size == padded else size

    def _bucket(
        self, form: Form, tokens: int, requests: int | None
    ) -> tuple[StaticInputs, BucketUse]:
        key = (tokens, requests)
        if key not in self._buckets:
            static = StaticInputs(form, tokens, requests)
            for tensor in static.buffers.values():
                torch._dynamo.mark_static_address(tensor, guard=False)
            if self._dynamic:
                mark_sizes(static.buffers)
            use = BucketUse(tokens, requests, buffer_bytes=static.nbytes())
            self._buckets[key] = static, use
        return self._buckets[key]

    def _capture_ahead(self, form: Form, named: dict[str, Tensor]) -> None:
        sizes = sorted(self.capture_sizes, reverse=True)
        console = Console(stderr=True)
        for size in track(
            sizes, "Capturing", console=console, transient=True, disable=not self._progress
        ):
            static, use = self._bucket(form, size, size if form.has_requests else None)
            static.clear()
            self._invoke(static, use, named)  # the warm-up; tells also what captures
            self._invoke(static, use, named)
            if self._own is not None and size == sizes[0]:
                self._invoke(static, use, named)  # its own first run came after the warm-up

    def _invoke(self, static: StaticInputs, use: BucketUse, named: dict[str, Tensor]) -> Any:
        """`fn` on the static inputs, by whatever captures it."""
        arguments = static.arguments(named)
        around = self._around and use.tokens == use.requests
        with watching() as graphs:
            if self._own is not None and (around or not self._around):
                result = self._own(arguments, use.tokens, use.requests)
            else:
                result = self._call(arguments)
        if self._own is None and (around if graphs else self._capture and not self._graphs):
            self._own = self._own_capture(arguments, graphs, static.device)
        self._graphs += [graph for graph in graphs if graph not in self._graphs]
        records = {id(graph.captures): graph for graph in self._graphs}
        total = sum(graph.nbytes() for graph in records.values())
        use.graph_bytes += total - self._graph_bytes
        self._graph_bytes = total
        return result

    def _own_capture(
        self, arguments: Arguments, inside: Sequence[CapturedGraph], device: torch.device
    ) -> WholeCall | None:
        recorder = recorder_for(device)
        if recorder is None:
            return None
        return WholeCall(self._call, self._fn, arguments, recorder, inside)

    def _call(self, arguments: Arguments) -> Any:
        args, kwargs = arguments
        return self._fn(*args, **kwargs)

    def _check_stream(self, device: torch.device) -> None:
        stream = _stream(device)
        if self._stream is _NO_CALL:
            self._stream = stream
        elif stream != self._stream:
            raise CaptureUseError(
                "a BucketRunner was called on another stream than before: its static inputs are "
                "one memory, and nothing orders the two streams; make a runner for each"
            )


def _stream(device: torch.device) -> Hashable:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
