"""CUDA graphs of compiled code: whole or in pieces, at addresses that are checked at every call.

`CapturedGraph` stands where AOTAutograd calls the code that Inductor made of one graph. At the
first meeting of a set of sizes it runs that code as it is: that is the warm-up, and a real call. At
the second it records, and repeats what it recorded from then on. Recording executes nothing, so no
row of a cache is touched that the call itself would not have touched.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

from swa_compile.addresses import keep_all, layout
from swa_compile.bucket import Bucket, Inputs, Sizes, addresses, place, returned
from swa_compile.captures import Captures, Skip
from swa_compile.passes import HoistError
from swa_compile.pieces import Call, Known, Piece, traced
from swa_compile.recording import CaptureError, Recorder
from swa_compile.schedule import schedule


class CaptureUseError(RuntimeError):
    """Captured code was used in a way that would make two calls share one memory."""


_UNKNOWN = Sizes()


class CapturedGraph:
    """The code of one graph, recorded and repeated.

    Args:
        run: the code; takes a list of inputs, which it may clear, and returns a sequence.
        pieces: what Inductor cut the code into, as `run` calls them.
        calls: what `run` calls, pieces by number and operators by name, where that is known.
        recorder: of the graph's device.
        inputs: what is known of the inputs.
        mode: "full", "piecewise" or "auto".
        obstacle: why the code must not be recorded as a whole, with the place in the source.
        capture_sizes: token counts to record; empty for all.
        strict: raise instead of skipping.
        captures: the record of the captured graph that `run` calls, which counts in it itself what
            runs uncaptured; a record of its own where there is none.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        recorder: Recorder,
        *,
        pieces: Sequence[Piece] = (),
        calls: Sequence[int | str] | None = None,
        inputs: Inputs | None = None,
        mode: str = "auto",
        obstacle: tuple[str, str] | None = None,
        capture_sizes: Sequence[int] = (),
        strict: bool = False,
        captures: Captures | None = None,
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._pieces = pieces
        self._calls = calls
        self._inputs = Inputs() if inputs is None else inputs
        self._obstacle = obstacle
        self._capture_sizes = frozenset(capture_sizes)
        self._strict = strict
        self._buckets: dict[Hashable, Bucket] = {}
        self._changing_places: list[int] | None = None
        self._stream: Hashable = None
        self._lock = threading.Lock()
        self._sizes = threading.local()
        self._counts = captures is None
        self.captures = Captures(mode, pieces=len(pieces)) if captures is None else captures

    @property
    def sizes(self) -> Sizes:
        """Of this thread's call; set, by who knows them, ahead of it."""
        return getattr(self._sizes, "value", _UNKNOWN)

    @sizes.setter
    def sizes(self, sizes: Sizes) -> None:
        self._sizes.value = sizes

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Run on `values`, which is cleared.

        Raises:
            CaptureUseError: from a second thread during a call, or from another stream than the
                graphs were recorded on.
            HoistError: with `strict`, where something is not captured.
        """
        if self._recorder.busy():
            return self._recorded_by_another(values)
        if not self._lock.acquire(blocking=False):
            raise CaptureUseError(
                "captured code was called while another call of it was running: its graphs share "
                "one memory; compile once for each thread, or call it from one thread at a time"
            )
        try:
            return self._call(values)
        finally:
            self._lock.release()

    def nbytes(self) -> int:
        """Bytes of memory pools that all recordings together took."""
        return sum(self.captures.memory.values())

    def forget(self) -> None:
        """Drop all recordings; each set of sizes is met anew."""
        self._buckets.clear()

    def _recorded_by_another(self, values: list[Any]) -> Sequence[Any]:
        """Run on `values`, all of which the caller records into a graph of their own."""
        why = self._against_whole(values)[0] if _recording_whole.get() else ""
        if why:
            raise CaptureError(why)
        return self._run(values)

    def _call(self, values: list[Any]) -> Sequence[Any]:
        watched = _watched.get()
        if watched is not None and self not in watched:
            watched.append(self)
        bucket = None if _uncaptured.get() else self._bucket(values)
        if bucket is None or bucket.off:
            self.captures.uncaptured += self._counts
            return self._run(values)
        self._check_stream()
        given = list(values)
        values.clear()
        if bucket.placement is not None:
            moved = bucket.placement.moved(given)
            for i in moved:
                bucket.moves[i] = bucket.moves.get(i, 0) + 1
            if moved or bucket.stale:
                bucket.forget()
                self.captures.recaptured += 1
        passed = list(given)
        if bucket.placement is None:
            bucket.placement = place(bucket, self._inputs, given, self._recorder.device)
            bucket.addresses = addresses(given)
            return self._first_replay(bucket, given, passed)
        self.captures.copied_inputs += bucket.placement.fill(passed)
        if bucket.whole is not None:
            if self._recorder.profiled():
                with traced(f"swa whole call, {bucket.label}"):
                    bucket.whole()
            else:
                bucket.whole()
            self.captures.full_replays += 1
        elif bucket.schedule is not None and bucket.schedule.applies():
            bucket.schedule.run()
            self.captures.direct_replays += 1
        else:
            return self._in_pieces(bucket, given, passed, recording=False)
        self.captures.replays += 1
        return returned([out.value for out in bucket.returns], bucket.returns, given)

    def _first_replay(self, bucket: Bucket, given: list[Any], passed: list[Any]) -> Sequence[Any]:
        """Record the bucket, and run this call by what was recorded."""
        assert bucket.placement is not None
        before = self._recorder.memory()
        self.captures.copied_inputs += bucket.placement.fill(passed)
        try:
            result = None
            if bucket.full:
                result = self._whole(bucket, given, passed)
            if result is None and not bucket.off:
                result = self._in_pieces(bucket, given, passed, recording=True)
        except BaseException:
            bucket.forget()
            raise
        added = self._recorder.memory() - before
        memory = self.captures.memory
        memory[bucket.label] = memory.get(bucket.label, 0) + added
        self.captures.note(bucket.label, bucket.recorded())
        if result is None:
            bucket.forget()
            self.captures.uncaptured += self._counts
            return self._run(list(given))
        return result

    def _whole(self, bucket: Bucket, given: list[Any], passed: list[Any]) -> Sequence[Any] | None:
        """Record the whole call; None where that cannot be."""
        why, name, source = self._against_whole(given)
        if not why:
            try:
                with _entered(_recording_whole, True):
                    replay, outputs = self._recorder.record(lambda: self._run(list(passed)))
            except CaptureError as error:
                why = f"the call cannot be captured as a whole ({error})"
            else:
                self.captures.captures += 1
                bucket.returns = keep_all(outputs, passed, self._recorder.borrow)
                bucket.whole = replay
                replay()
                self.captures.replays += 1
                self.captures.full_replays += 1
                return returned(outputs, bucket.returns, given)
        bucket.full = False
        bucket.off = not self._pieces or self.captures.mode == "full"
        what = "runs uncaptured" if bucket.off else "is captured in pieces"
        what = what if self._counts else "is left to the captures of the code inside"
        self._skip(Skip(f"{bucket.label} {what}: {why}", name, source, self.sizes.tokens))
        return None

    def _against_whole(self, values: Sequence[Any]) -> tuple[str, str, str]:
        """Why a graph of the whole call would be wrong, "" if it is not; the input and its line."""
        if self._obstacle is not None:
            why, source = self._obstacle
            return why, "", source
        for i, value in enumerate(values):
            name, source = self._inputs.name(i), self._inputs.source(i)
            if isinstance(value, Tensor):
                if value.device != self._recorder.device:
                    why = f"{name} is a tensor on {value.device}, which a graph reads only once"
                    return why, name, source
            elif not isinstance(value, (int, float, bool, type(None))):
                return f"{name} is a {type(value).__name__}, which no graph takes", name, source
        return "", "", ""

    def _in_pieces(
        self, bucket: Bucket, given: list[Any], passed: list[Any], recording: bool
    ) -> Sequence[Any]:
        known = Known(passed if recording else ())
        call = Call(
            self._recorder,
            self.captures,
            self._skip,
            bucket.states,
            tokens=self.sizes.tokens,
            label=bucket.label,
            recording=recording,
            known=known,
        )
        for piece in self._pieces:
            piece.call = call
        try:
            with call.islands():
                outputs = self._run(list(passed))
        finally:
            for piece in self._pieces:
                piece.call = None
            bucket.stale = call.broken
        # What ran between the pieces may keep memory that a schedule would write over.
        bucket.schedule = None
        if recording:
            bucket.returns = keep_all(outputs, passed, self._recorder.borrow)
            # Inductor copies inputs that are not aligned, ahead of the code, at every call.
            if bucket.placement is not None and bucket.placement.aligned():
                bucket.schedule = schedule(
                    self._calls, call.steps, bucket.states.recordings, self._recorder, bucket.label
                )
        if bucket.states.recordings:
            self.captures.replays += 1
        else:
            bucket.off = True
            self.captures.uncaptured += 1
        return returned(outputs, bucket.returns, given)

    def _bucket(self, values: Sequence[Any]) -> Bucket | None:
        """The bucket of a call that is to be captured or replayed; None where it is not."""
        sizes = self.sizes
        if sizes.tokens == 0:
            return None
        if self._capture_sizes and sizes.tokens not in self._capture_sizes:
            if sizes.tokens is None:
                self._skip(Skip("capture_sizes counts tokens, and the graph has no size of them"))
            else:
                at = sizes.tokens
                self.captures.skip(Skip(f"{at} tokens are not among capture_sizes", tokens=at))
            return None
        full = not self._pieces or self.captures.mode == "full"
        full = full or (self.captures.mode == "auto" and sizes.decode)
        key: list[Any] = [full]
        # Dynamo's guards keep the layouts of static inputs.
        for i in self._changing(len(values)):
            value = values[i]
            if not isinstance(value, Tensor):
                key.append(value if isinstance(value, Hashable) else id(value))
            else:
                if not value.numel():
                    return None  # an idle rank; nothing to launch
                key.append(layout(value))
        bucket = self._buckets.get(tuple(key))
        if bucket is None:
            label = "sizes" if sizes.tokens is None else f"{sizes.tokens} tokens"
            known = sum(b.label.split(" #")[0] == label for b in self._buckets.values())
            label = f"{label} #{known + 1}" if known else label
            bucket = self._buckets[tuple(key)] = Bucket(label, full)
            bucket.addresses = addresses(values)
            return None  # the warm-up
        return bucket

    def _changing(self, count: int) -> list[int]:
        """The places of the inputs that are not static."""
        if self._changing_places is None:
            static = self._inputs.static
            self._changing_places = [i for i in range(count) if i not in static]
        return self._changing_places

    def _check_stream(self) -> None:
        stream = self._recorder.stream()
        if self._stream is None:
            self._stream = stream
        elif stream != self._stream:
            raise CaptureUseError(
                "captured code was called on another stream than it was captured on: its graphs "
                "share one memory, and nothing orders the two streams; call it on one stream, or "
                "compile once for each"
            )

    def _skip(self, skip: Skip) -> None:
        new = self.captures.skip(skip)
        if self._strict:
            raise HoistError(f"{skip} (strict=True)")
        if new:
            warnings.warn(str(skip), stacklevel=2)


T = TypeVar("T")


@contextmanager
def _entered(variable: ContextVar[T], value: T) -> Iterator[T]:
    """`variable` has `value` inside the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


# The captured graphs that were called in this context, where somebody asks.
_watched: ContextVar[list[CapturedGraph] | None] = ContextVar("swa_compile_watched", default=None)


def watching() -> AbstractContextManager[list[CapturedGraph]]:
    """The captured graphs that are called inside the block."""
    return _entered(_watched, [])  # type: ignore[arg-type]


# Whether this context runs captured code without its graphs.
_uncaptured: ContextVar[bool] = ContextVar("swa_compile_uncaptured", default=False)


def uncaptured() -> AbstractContextManager[bool]:
    """Captured code that is called inside the block records and repeats nothing."""
    return _entered(_uncaptured, True)


# Whether a captured graph of ours records a call around others.
_recording_whole: ContextVar[bool] = ContextVar("swa_compile_recording_whole", default=False)
