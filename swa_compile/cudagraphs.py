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
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from swa_compile.addresses import LARGE, Output, Placement, independent, layout, nbytes, sharing
from swa_compile.captures import Captures, Skip
from swa_compile.passes import HoistError
from swa_compile.pieces import Known, Piece, PieceStates
from swa_compile.recording import CaptureError, Recorder

T = TypeVar("T")


class CaptureUseError(RuntimeError):
    """Captured code was used in a way that would make two calls share one memory."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call that decide how it is captured.

    Attributes:
        tokens: N, or None where the graph has no dimension of tokens that is known.
        decode: every request has as many rows as it has tokens: one.
    """

    tokens: int | None = None
    decode: bool = False


_UNKNOWN = Sizes()


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of the code, by their places.

    Attributes:
        static: parameters, buffers and inputs at addresses marked static.
        written: inputs that the code writes.
        names, sources: for reports; may be shorter than the inputs.
        bound: all inputs are used where they are, none is copied.
    """

    static: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    names: Sequence[str] = ()
    sources: Sequence[str] = ()
    bound: bool = False

    def name(self, place: int) -> str:
        return self.names[place] if place < len(self.names) else f"input {place}"

    def source(self, place: int) -> str:
        return self.sources[place] if place < len(self.sources) else ""


@dataclass
class Bucket:
    """One set of sizes: what was seen of it, and what is recorded.

    Attributes:
        label: for the reports.
        full: recorded as a whole, or in pieces.
        off: runs uncaptured from now on.
        addresses: place -> where each tensor was at the last call that did not replay.
        moves: place -> how often a bound tensor had moved.
        placement: of the recording; None where there is none.
        whole: repeats the recording of a whole call.
        states: of the pieces.
        returns: which outputs are inputs, and which are not.
        stale: to be recorded anew at the next call.
    """

    label: str
    full: bool
    off: bool = False
    addresses: dict[int, int] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)
    placement: Placement | None = None
    whole: Callable[[], None] | None = None
    states: PieceStates = field(default_factory=PieceStates)
    returns: list[Output] = field(default_factory=list)
    stale: bool = False

    def forget(self) -> None:
        """Drop the recordings; what was learned of the addresses stays."""
        self.placement = self.whole = None
        self.states.recordings.clear()
        self.stale = False


class CapturedGraph:
    """The code of one graph, recorded and repeated.

    Args:
        run: the code; takes a list of inputs, which it may clear, and returns a sequence.
        pieces: what Inductor cut the code into, as `run` calls them.
        recorder: of the graph's device.
        inputs: what is known of the inputs.
        mode: "full", "piecewise" or "auto".
        obstacle: why the code must not be recorded as a whole, with the place in the source.
        capture_sizes: token counts to record; empty for all.
        strict: raise instead of skipping.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        recorder: Recorder,
        *,
        pieces: Sequence[Piece] = (),
        inputs: Inputs | None = None,
        mode: str = "auto",
        obstacle: tuple[str, str] | None = None,
        capture_sizes: Sequence[int] = (),
        strict: bool = False,
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._pieces = pieces
        self._inputs = Inputs() if inputs is None else inputs
        self._obstacle = obstacle
        self._capture_sizes = frozenset(capture_sizes)
        self._strict = strict
        self._buckets: dict[Hashable, Bucket] = {}
        self._changing_places: list[int] | None = None
        self._stream: Hashable = None
        self._lock = threading.Lock()
        self._sizes = threading.local()
        self.captures = Captures(mode, pieces=len(pieces))

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
            return self._run(values)  # the caller records all this into a graph of their own
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

    def _call(self, values: list[Any]) -> Sequence[Any]:
        watched = _watched.get()
        if watched is not None and self not in watched:
            watched.append(self)
        bucket = self._bucket(values)
        if bucket is None or bucket.off:
            self.captures.uncaptured += 1
            return self._run(values)
        self._check_stream()
        given = list(values)
        values.clear()
        if bucket.placement is not None:
            moved = bucket.placement.moved(given)
            for place in moved:
                bucket.moves[place] = bucket.moves.get(place, 0) + 1
            if moved or bucket.stale:
                bucket.forget()
                self.captures.recaptured += 1
        passed = list(given)
        if bucket.placement is None:
            bucket.placement = self._place(bucket, given)
            bucket.addresses = _addresses(given)
            return self._first_replay(bucket, given, passed)
        self.captures.copied_inputs += bucket.placement.fill(passed)
        if bucket.whole is None:
            return self._in_pieces(bucket, given, passed, recording=False)
        bucket.whole()
        self.captures.replays += 1
        self.captures.full_replays += 1
        return _returned([out.value for out in bucket.returns], bucket.returns, given)

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
        if result is None:
            bucket.forget()
            self.captures.uncaptured += 1
            return self._run(list(given))
        return result

    def _whole(self, bucket: Bucket, given: list[Any], passed: list[Any]) -> Sequence[Any] | None:
        """Record the whole call; None where that cannot be."""
        why, name, source = self._against_whole(given)
        if not why:
            try:
                replay, outputs = self._recorder.record(lambda: self._run(list(passed)))
            except CaptureError as error:
                why = f"the call cannot be captured as a whole ({error})"
            else:
                self.captures.captures += 1
                bucket.returns = self._kept(outputs, passed)
                bucket.whole = replay
                replay()
                self.captures.replays += 1
                self.captures.full_replays += 1
                return _returned(outputs, bucket.returns, given)
        bucket.full = False
        bucket.off = not self._pieces or self.captures.mode == "full"
        what = "runs uncaptured" if bucket.off else "is captured in pieces"
        self._skip(Skip(f"{bucket.label} {what}: {why}", name, source, self.sizes.tokens))
        return None

    def _against_whole(self, values: Sequence[Any]) -> tuple[str, str, str]:
        """Why a graph of the whole call would be wrong, "" if it is not; the input and its line."""
        if self._obstacle is not None:
            why, source = self._obstacle
            return why, "", source
        for place, value in enumerate(values):
            name, source = self._inputs.name(place), self._inputs.source(place)
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
        call = Call(self, bucket, recording, Known(passed) if recording else None)
        for piece in self._pieces:
            piece.call = call
        try:
            with call.islands():
                outputs = self._run(list(passed))
        finally:
            for piece in self._pieces:
                piece.call = None
            bucket.stale = call.broken
        if recording:
            bucket.returns = self._kept(outputs, passed)
        if bucket.states.recordings:
            self.captures.replays += 1
        else:
            bucket.off = True
            self.captures.uncaptured += 1
        return _returned(outputs, bucket.returns, given)

    def _kept(self, outputs: Sequence[Any], passed: list[Any]) -> list[Output]:
        return [Output.keep(out, passed, self._recorder.borrow) for out in outputs]

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
        for place in self._changing(len(values)):
            value = values[place]
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
            bucket.addresses = _addresses(values)
            return None  # the warm-up
        return bucket

    def _changing(self, count: int) -> list[int]:
        """The places of the inputs that are not static."""
        if self._changing_places is None:
            static = self._inputs.static
            self._changing_places = [i for i in range(count) if i not in static]
        return self._changing_places

    def _place(self, bucket: Bucket, values: Sequence[Any]) -> Placement:
        """Which inputs the next recording of `bucket` is bound to, and which it owns."""
        tensors = {
            i: v
            for i, v in enumerate(values)
            if isinstance(v, Tensor) and v.device == self._recorder.device
        }
        fixed = self._inputs.static | sharing(tensors, set(self._inputs.written))
        # Small inputs may have been at the same address twice by luck. When one has moved, all
        # are copied: that costs next to nothing, and a recording for each would cost much.
        small_moved = any(
            place not in fixed and not _large(tensors[place]) for place in bucket.moves
        )
        bound: dict[int, Tensor] = {}
        owned: dict[int, Tensor] = {}
        for place, tensor in tensors.items():
            if _large(tensor):
                own = bucket.moves.get(place, 0) > 1
            else:
                own = small_moved or tensor.data_ptr() != bucket.addresses.get(place)
            free = place not in fixed and not self._inputs.bound
            (owned if own and free else bound)[place] = tensor
        return Placement(bound, owned)

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


# The captured graphs that were called in this context, where somebody asks.
_watched: ContextVar[list[CapturedGraph] | None] = ContextVar("swa_compile_watched", default=None)


@contextmanager
def watching() -> Iterator[list[CapturedGraph]]:
    """The captured graphs that are called inside the block."""
    graphs: list[CapturedGraph] = []
    token = _watched.set(graphs)
    try:
        yield graphs
    finally:
        _watched.reset(token)


class Call:
    """One call that is recorded or replayed in pieces, as the pieces see it."""

    def __init__(
        self, graph: CapturedGraph, bucket: Bucket, recording: bool, known: Known | None
    ) -> None:
        self._graph = graph
        self._bucket = bucket
        self._islands = ExitStack()
        self.recording = recording
        self.known = known if known is not None else Known(())
        self.states = bucket.states
        self.captures = graph.captures
        self.tokens = graph.sizes.tokens
        self.device = graph._recorder.device
        self.borrow = graph._recorder.borrow
        self.broken = False  # from here on, nothing is where the recordings expect it

    def breaks(self) -> None:
        self.broken = True

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        # The pool of the islands would serve the recording's allocations, too.
        self._islands.close()
        try:
            recorded = self._graph._recorder.record(run)
        finally:
            self._enter_islands()
        self.captures.captures += 1
        return recorded

    def skip(self, skip: Skip) -> None:
        self._graph._skip(skip)

    @contextmanager
    def islands(self) -> Iterator[None]:
        """What runs between the pieces allocates from a pool of the bucket's."""
        self._enter_islands()
        try:
            yield
        finally:
            self._islands.close()

    def _enter_islands(self) -> None:
        self._islands.enter_context(self._graph._recorder.islands(id(self._bucket)))


def _returned(outputs: Sequence[Any], returns: list[Output], given: list[Any]) -> list[Any]:
    """`outputs` as the caller may keep them: the caller's own tensors, or copies."""
    copies: dict[int, Tensor] = {}  # what is returned twice stays one tensor
    result = []
    for out, known in zip(outputs, returns, strict=True):
        if known.place is not None:
            result.append(known.of(given))
        elif isinstance(out, Tensor):
            if id(out) not in copies:
                copies[id(out)] = independent(out)
            result.append(copies[id(out)])
        else:
            result.append(out)
    return result


def _large(tensor: Tensor) -> bool:
    return nbytes(tensor) > LARGE


def _addresses(values: Sequence[Any]) -> dict[int, int]:
    return {i: v.data_ptr() for i, v in enumerate(values) if isinstance(v, Tensor)}
