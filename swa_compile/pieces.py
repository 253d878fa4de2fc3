"""The pieces that Inductor cuts a graph into, each recorded and repeated on its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from swa_compile.addresses import Layout, Output, Placement, keep_all, layout
from swa_compile.captures import Captures, Skip
from swa_compile.ops.attention_calls import heard_attention
from swa_compile.recording import CaptureError, Recorder

T = TypeVar("T")

PieceFunction = Callable[[list[Any]], Any]

# An input that comes from between the pieces may move this often before it is copied instead.
_MOVES = 2


@dataclass
class PieceRecording:
    """One piece at one bucket.

    Attributes:
        replay: repeats the work.
        fresh: what the piece returned, None where that is made of the arguments.
        passed: those, with their places.
        ints: the arguments that are no tensors, with their places.
        checked: place -> layout, of the tensors that did not come from the graph's inputs or from
            another recording, so that their addresses are not known beforehand.
        placement: where those are.
    """

    replay: Callable[[], None]
    fresh: list[Any]
    passed: list[tuple[int, Output]]
    ints: list[tuple[int, Any]]
    checked: dict[int, Layout]
    placement: Placement


@dataclass
class PieceStates:
    """What is known of the pieces of one bucket, across its recordings."""

    recordings: dict[int, PieceRecording] = field(default_factory=dict)
    moves: dict[tuple[int, int], int] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)


class Known:
    """The tensors of one call whose addresses cannot change while the bucket's recordings last."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self.add(tensors)

    def add(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._refs[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: Tensor) -> bool:
        # An id is used again when its tensor is gone.
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor


class Call:
    """One call that is recorded or replayed in pieces, as the pieces see it.

    Attributes:
        states: of the pieces at this call's sizes.
        tokens: of the call, for reports.
        label: of its bucket, for traces.
        recording: the pieces are to be recorded; else replayed.
        known: see `Known`; filled while recording.
        steps: numbers of the pieces and launches of the operators between them, while recording.
        broken: from here on, nothing is where the recordings expect it.
    """

    def __init__(
        self,
        recorder: Recorder,
        captures: Captures,
        skip: Callable[[Skip], None],
        states: PieceStates,
        *,
        tokens: int | None,
        label: str,
        recording: bool,
        known: Known,
    ) -> None:
        self._recorder = recorder
        self._islands = ExitStack()
        self.captures = captures
        self.skip = skip
        self.states = states
        self.tokens = tokens
        self.label = label
        self.profiled = recorder.profiled()
        self.recording = recording
        self.known = known
        self.steps: list[int | Callable[[], None]] = []
        self.broken = False
        self.device = recorder.device
        self.borrow = recorder.borrow

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """`Recorder.record`, outside of the islands' pool, which would serve it, too."""
        self._islands.close()
        try:
            recorded = self._recorder.record(run)
        finally:
            self._enter_islands()
        self.captures.captures += 1
        return recorded

    @contextmanager
    def islands(self) -> Iterator[None]:
        """What runs between the pieces allocates from a pool of these sizes."""
        self._enter_islands()
        try:
            yield
        finally:
            self._islands.close()

    def _enter_islands(self) -> None:
        self._islands.enter_context(self._recorder.islands(id(self.states)))
        if self.recording:
            self._islands.enter_context(heard_attention(self.steps.append, self.borrow))


class Piece:
    """Stands where Inductor's code calls piece number `index`."""

    def __init__(self, index: int, run: PieceFunction) -> None:
        self.index = index
        self.run = run
        self.call: Call | None = None  # set while the graph around it wants pieces recorded

    def __call__(self, args: list[Any]) -> Any:
        call = self.call
        if call is None or call.broken or self.index in call.states.excluded:
            return self.run(args)
        return self._record(call, args) if call.recording else self._replay(call, args)

    def _replay(self, call: Call, args: list[Any]) -> Any:
        recording = call.states.recordings.get(self.index)
        if recording is None:
            return self.run(args)
        if not _same_sizes(recording, args):
            # Sizes that the inputs do not determine: a graph for each is never worth it.
            self._exclude(call, "its sizes depend on data, so they change from call to call")
            call.broken = True
            return self.run(args)
        moved = recording.placement.moved(args)
        if moved:
            for place in moved:
                key = (self.index, place)
                call.states.moves[key] = call.states.moves.get(key, 0) + 1
            call.broken = True
            return self.run(args)
        call.captures.copied_inputs += recording.placement.fill(args)
        if call.profiled:
            with traced(f"swa piece {self.index}, {call.label}"):
                recording.replay()
        else:
            recording.replay()
        outputs = recording.fresh.copy()
        for i, out in recording.passed:
            outputs[i] = out.of(args)
        args.clear()
        return outputs

    def _record(self, call: Call, args: list[Any]) -> Any:
        elsewhere = [a for a in args if isinstance(a, Tensor) and a.device != call.device]
        if elsewhere:
            self._exclude(call, f"it takes a tensor on {elsewhere[0].device}")
            return self.run(args)
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor)}
        checked = {i: a for i, a in tensors.items() if a not in call.known}
        owned = {
            i: a for i, a in checked.items() if call.states.moves.get((self.index, i), 0) >= _MOVES
        }
        placement = Placement({i: a for i, a in checked.items() if i not in owned}, owned)
        layouts = {i: layout(a) for i, a in checked.items()}
        ints = [(i, a) for i, a in enumerate(args) if i not in tensors]
        del tensors, checked, owned
        call.captures.copied_inputs += placement.fill(args)
        given = list(args)  # `args` is the caller's and is cleared
        try:
            replay, outputs = call.record(lambda: self.run(list(given)))
        except CaptureError as error:
            self._exclude(call, f"it cannot be captured ({error})")
            return self.run(args)
        replay()
        call.steps.append(self.index)
        call.known.add([out for out in outputs if not any(out is a for a in args)])
        kept = keep_all(outputs, args, call.borrow)
        fresh = [out.value for out in kept]
        passed = [(i, out) for i, out in enumerate(kept) if out.place is not None]
        call.states.recordings[self.index] = PieceRecording(
            replay, fresh, passed, ints, layouts, placement
        )
        args.clear()
        return outputs

    def _exclude(self, call: Call, why: str) -> None:
        call.states.excluded.add(self.index)
        call.skip(Skip(f"piece {self.index} runs uncaptured: {why}", tokens=call.tokens))


def _same_sizes(recording: PieceRecording, args: Sequence[Any]) -> bool:
    return all(args[i] == value for i, value in recording.ints) and all(
        layout(args[i]) == wanted for i, wanted in recording.checked.items()
    )


def traced(name: str) -> AbstractContextManager[object]:
    """A span of that name in profiles, where a replay shows as one nameless launch otherwise."""
    return torch.profiler.record_function(name)
