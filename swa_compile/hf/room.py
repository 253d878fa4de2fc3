"""What a pool has room for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from swa_compile.kv import HybridKVPool

if TYPE_CHECKING:
    from swa_compile.hf.scheduler import Sequence


class Room:
    """The most that sequences may take of a pool, against what there is.

    Args:
        pool: whose requests are all the scheduler's.
        chunk: prompt tokens of a sequence per forward.
        lookahead: tokens beyond the next one that a decoding sequence may take in a forward.
        name: of the pool, for messages.
        restarts: sequences may be computed anew, and then send new tokens by chunks, too.
    """

    def __init__(
        self,
        pool: HybridKVPool,
        chunk: int,
        lookahead: int = 0,
        name: str = "the pool",
        *,
        restarts: bool = False,
    ) -> None:
        self.pool, self.chunk, self.lookahead, self.name = pool, chunk, lookahead, name
        self.restarts = restarts
        self._full_pages = pool.full_tokens // pool.page_size
        self._swa_pages = pool.swa_tokens // pool.page_size

    def longest_piece(self, sequence: Sequence) -> int:
        """Most tokens by which `sequence` is extended in one forward."""
        known = sequence.tokens if self.restarts else len(sequence.prompt)
        return max(min(self.chunk, known), 1 + self.lookahead)

    def fits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all of them can run at once and never run out of slots."""
        taken = [self._pages(sequence) for sequence in sequences]
        return (
            len(taken) <= self.pool.max_requests
            and sum(full for full, _ in taken) <= self._full_pages
            and sum(swa for _, swa in taken) <= self._swa_pages
        )

    def refuse_what_never_fits(self, sequence: Sequence) -> None:
        """Raise where the pool is too small for `sequence` alone.

        Raises:
            ValueError: with what it needs and what there is.
        """
        pool, size = self.pool, self.pool.page_size
        full, swa = self._pages(sequence)
        name = f"prompt {sequence.index} ({len(sequence.prompt)} tokens, {sequence.limit} new)"
        if sequence.tokens > pool.max_context or full > self._full_pages:
            there = f"{self.name} has {pool.full_tokens}"
            if pool.max_context < pool.full_tokens:  # by the caller, or by the model's positions
                there = f"a request of {self.name} has at most {pool.max_context}"
            raise ValueError(f"{name} takes {sequence.tokens} slots; {there}")
        if swa > self._swa_pages:
            raise ValueError(
                f"{name} takes {swa * size} SWA slots; {self.name} has {pool.swa_tokens}"
            )

    def _pages(self, sequence: Sequence) -> tuple[int, int]:
        """Full and SWA pages that `sequence` holds at most."""
        full = -(-sequence.tokens // self.pool.page_size)
        if self.pool.window is None:
            return full, 0
        return full, min(full, self.pool.swa_pages_bound(self.longest_piece(sequence)))


def chunk_for(pool: HybridKVPool, chunk: int | None) -> int:
    """Prompt tokens of a request per forward: `chunk`, or what suits the pool.

    Raises:
        ValueError: `chunk` is no int of at least 1.
    """
    if chunk is not None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk is an int of at least 1; got {chunk!r}")
        return chunk
    window = pool.window
    if window is None:
        return 512
    # The bound on SWA pages rises by one page per page: solved for what fits.
    pages = pool.swa_tokens // pool.page_size
    fits = (pages - 1) * pool.page_size - (window - 1)
    return max(1, min(window, fits))
