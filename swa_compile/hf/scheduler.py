"""Which requests run, and which of their tokens go into the next forward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swa_compile.kv import HybridKVPool


@dataclass
class Sequence:
    """One prompt and what was generated for it.

    Attributes:
        index: its place among the prompts.
        prompt: token ids, not empty.
        limit: most new tokens.
        new: those there are.
        sent: tokens that have been through the model.
        row: its request in the pool, while it runs.
        begun_at: tokens it was known to have when the first of them was sent.
    """

    index: int
    prompt: list[int]
    limit: int
    new: list[int] = field(default_factory=list)
    sent: int = 0
    row: int | None = None
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

    def pending(self, most: int) -> list[int]:
        """The next tokens to send, at most `most`."""
        ahead = self.prompt[self.sent : self.sent + most]
        start = max(self.sent - len(self.prompt), 0)
        return ahead + self.new[start : start + most - len(ahead)]


class Scheduler:
    """Runs sequences over a pool, first come first served.

    A sequence is let in when the pool has room for all that it may still take, so none that runs
    ever runs out of slots; the others wait. A long prompt goes in by chunks, beside the decode
    steps of the others.

    Args:
        pool: whose requests are all its own.
        chunk: prompt tokens of a sequence per forward.
        restart_at: a sequence that grows past so many tokens is computed anew from its first.
    """

    def __init__(self, pool: HybridKVPool, chunk: int, restart_at: int | None = None) -> None:
        self.pool = pool
        self.chunk = chunk
        self.restart_at = restart_at
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._full_pages = pool.full_tokens // pool.page_size
        self._swa_pages = pool.swa_tokens // pool.page_size

    def refuse_what_never_fits(self, sequence: Sequence) -> None:
        """Raise where the pool is too small for `sequence` alone.

        Raises:
            ValueError: with what it needs and what there is.
        """
        pool, size = self.pool, self.pool.page_size
        full, swa = self._pages(sequence)
        name = f"prompt {sequence.index} ({len(sequence.prompt)} tokens, {sequence.limit} new)"
        if sequence.tokens > pool.max_context or full > self._full_pages:
            capacity = min(pool.max_context, pool.full_tokens)
            raise ValueError(f"{name} takes {sequence.tokens} slots; the pool has {capacity}")
        if swa > self._swa_pages:
            raise ValueError(f"{name} takes {swa * size} SWA slots; the pool has {pool.swa_tokens}")

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` at the end of the queue."""
        self.waiting.append(sequence)

    def pieces(self) -> list[tuple[Sequence, list[int]]]:
        """The next forward: who takes part, with which tokens. Lets in whoever fits."""
        while self.waiting and self._has_room(self.waiting[0]):
            sequence = self.waiting.popleft()
            self._begin(sequence)
            self.running.append(sequence)
        pieces = []
        for sequence in self.running:
            assert sequence.row is not None
            if (
                self.restart_at is not None
                and sequence.begun_at <= self.restart_at < sequence.length
            ):
                self.pool.close(sequence.row)
                self._begin(sequence)
            bound = self.pool.piece_bound(sequence.row)
            most = self.chunk if bound is None else min(self.chunk, bound)
            pieces.append((sequence, sequence.pending(most)))
        return pieces

    def _begin(self, sequence: Sequence) -> None:
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

    def _pages(self, sequence: Sequence) -> tuple[int, int]:
        """Full and SWA pages that `sequence` holds at most."""
        full = -(-sequence.tokens // self.pool.page_size)
        if self.pool.window is None:
            return full, 0
        # What begins anew sends new tokens by chunks too.
        begun = sequence.tokens if self.restart_at is not None else len(sequence.prompt)
        longest_piece = min(self.chunk, max(begun, 1))
        return full, min(full, self.pool.swa_pages_bound(longest_piece))

    def _has_room(self, sequence: Sequence) -> bool:
        if len(self.running) == self.pool.max_requests:
            return False
        full, swa = self._pages(sequence)
        for other in self.running:
            taken = self._pages(other)
            full, swa = full + taken[0], swa + taken[1]
        return full <= self._full_pages and swa <= self._swa_pages
