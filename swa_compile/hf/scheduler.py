"""Which requests run, and which of their tokens go into the next forward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swa_compile.hf.room import Room


@dataclass
class Sequence:
    """One prompt and what was generated for it.

    Attributes:
        index: its place among the prompts.
        prompt: token ids, not empty.
        limit: most new tokens.
        new: those there are; negative: a place holder for one that the host does not know yet.
        sent: tokens that have been through the model.
        row: its request in the pool, while it runs.
        draft_row: its request in the pool of a draft model, while it runs and there is one.
        begun_at: tokens it was known to have when the first of them was sent.
    """

    index: int
    prompt: list[int]
    limit: int
    new: list[int] = field(default_factory=list)
    sent: int = 0
    row: int | None = None
    draft_row: int | None = None
    begun_at: int = 0

    @property
    def length(self) -> int:
        """Tokens that it is known to have."""
        return len(self.prompt) + len(self.new)

    @property
    def tokens(self) -> int:
        """Slots that it takes at most: the last new token is never stored."""
        return len(self.prompt) + max(self.limit - 1, 0)

    @property
    def waits_for_token(self) -> bool:
        """All its tokens have been through the model: the last logits give the next."""
        return self.sent == self.length

    def after(self, count: int, most: int) -> list[int]:
        """Of its tokens, new ones included, those behind the first `count`, at most `most`."""
        start, end = (max(place - len(self.prompt), 0) for place in (count, count + most))
        return self.prompt[count : count + most] + self.new[start:end]

    def pending(self, most: int) -> list[int]:
        """The next tokens to send, at most `most`."""
        ahead = self.prompt[self.sent : self.sent + most]
        start = max(self.sent - len(self.prompt), 0)
        return ahead + self.new[start : start + most - len(ahead)]


class Scheduler:
    """Runs sequences over a pool, first come first served.

    A sequence is let in when there is room for all that it may still take, so none that runs
    ever runs out of slots; the others wait. A long prompt goes in by chunks, beside the decode
    steps of the others.

    Args:
        room: of the pool, whose requests are all its own.
        restart_at: a sequence that grows past so many tokens is computed anew from its first.
    """

    def __init__(self, room: Room, restart_at: int | None = None) -> None:
        self.pool = room.pool
        self.chunk = room.chunk
        self.rooms = [room]
        self.restart_at = restart_at
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` at the end of the queue.

        Raises:
            ValueError: it could never run, with what it needs and what there is.
        """
        for room in self.rooms:
            room.refuse_what_never_fits(sequence)
        self.waiting.append(sequence)

    def pieces(self) -> list[tuple[Sequence, list[int]]]:
        """The next forward: who takes part, with which tokens. Lets in whoever fits."""
        self.admit()
        pieces = []
        for sequence in self.running:
            assert sequence.row is not None
            if self._outgrown(sequence):
                self.pool.close(sequence.row)
                self.open(sequence)
            bound = self.pool.piece_bound(sequence.row)
            most = self.chunk if bound is None else min(self.chunk, bound)
            pieces.append((sequence, sequence.pending(most)))
        return pieces

    def admit(self) -> None:
        """Let in whoever fits, in order."""
        while self.waiting and all(
            room.fits([*self.running, self.waiting[0]]) for room in self.rooms
        ):
            sequence = self.waiting.popleft()
            self.open(sequence)
            self.running.append(sequence)

    def open(self, sequence: Sequence) -> None:
        """Make it a request of the pool, of which nothing has been sent."""
        sequence.row, sequence.sent, sequence.begun_at = self.pool.open(), 0, sequence.length

    def _outgrown(self, sequence: Sequence) -> bool:
        border = self.restart_at
        return border is not None and sequence.begun_at <= border < sequence.length

    def finish(self, sequence: Sequence) -> None:
        """Give back what `sequence` holds."""
        assert sequence.row is not None
        self.pool.close(sequence.row)
        sequence.row = None
        self.running.remove(sequence)

    def clear(self) -> None:
        """End all sequences."""
        self.waiting.clear()
        for sequence in list(self.running):
            self.finish(sequence)
