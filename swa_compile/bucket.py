"""One set of sizes of a captured graph: where its inputs are, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swa_compile.addresses import LARGE, Output, Placement, independent, nbytes, sharing
from swa_compile.captures import Recorded
from swa_compile.pieces import PieceStates
from swa_compile.schedule import Schedule


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call that decide how it is captured.

    Attributes:
        tokens: N, or None where the graph has no dimension of tokens that is known.
        decode: every request has as many rows as it has tokens: one.
    """

    tokens: int | None = None
    decode: bool = False


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
        schedule: all that a call in pieces launches, where that is known.
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
    schedule: Schedule | None = None
    returns: list[Output] = field(default_factory=list)
    stale: bool = False

    def recorded(self) -> Recorded:
        """What is repeated, for the record."""
        pieces = tuple(sorted(self.states.recordings))
        return Recorded(self.whole is not None, pieces, self.schedule is not None)

    def forget(self) -> None:
        """Drop the recordings; what was learned of the addresses stays."""
        self.placement = self.whole = self.schedule = None
        self.states.recordings.clear()
        self.stale = False


def place(bucket: Bucket, inputs: Inputs, values: Sequence[Any], device: torch.device) -> Placement:
    """Which inputs the next recording of `bucket` is bound to, and which it owns."""
    tensors = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and v.device == device}
    fixed = inputs.static | sharing(tensors, set(inputs.written))
    # Small inputs may have been at the same address twice by luck. When one has moved, all
    # are copied: that costs next to nothing, and a recording for each would cost much.
    small_moved = any(i not in fixed and not _large(tensors[i]) for i in bucket.moves)
    bound: dict[int, Tensor] = {}
    owned: dict[int, Tensor] = {}
    for i, tensor in tensors.items():
        if _large(tensor):
            own = bucket.moves.get(i, 0) > 1
        else:
            own = small_moved or tensor.data_ptr() != bucket.addresses.get(i)
        free = i not in fixed and not inputs.bound
        (owned if own and free else bound)[i] = tensor
    return Placement(bound, owned)


def returned(outputs: Sequence[Any], returns: list[Output], given: list[Any]) -> list[Any]:
    """`outputs` as the caller may keep them: the caller's own tensors, or copies."""
    pairs = list(zip(outputs, returns, strict=True))
    fresh = [out for out, known in pairs if known.place is None and isinstance(out, Tensor)]
    copies = iter(independent(fresh))
    result = []
    for out, known in pairs:
        if known.place is not None:
            result.append(known.of(given))
        else:
            result.append(next(copies) if isinstance(out, Tensor) else out)
    return result


def _large(tensor: Tensor) -> bool:
    return nbytes(tensor) > LARGE


def addresses(values: Sequence[Any]) -> dict[int, int]:
    return {i: v.data_ptr() for i, v in enumerate(values) if isinstance(v, Tensor)}
