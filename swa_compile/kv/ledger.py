"""Who owns which pages of a hybrid pool, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swa_compile.kv.requests import Request, Taken
from swa_compile.kv.slots import OutOfSlots, PageList
from swa_compile.kv.windows import Windows


class Ledger:
    """The requests of a pool, their pages, and the free ones.

    It decides and keeps lists; its callers write what it tells them into the tables of the device.

    Args:
        windows: of the sliding-window layers.
        page_size: tokens per page.
        full_pages, swa_pages: pages of each pool beside the sink.
        max_requests: requests that can be open at once.
        max_context: tokens that one request can have.

    Attributes:
        full, swa: the free pages of each pool.
        requests: those that are open, by row.
        free_rows: rows of no request; the last one is the first handed out.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        page_size: int,
        full_pages: int,
        swa_pages: int,
        max_requests: int,
        max_context: int,
    ) -> None:
        self._windows, self._page_size = windows, page_size
        self._max_requests, self._max_context = max_requests, max_context
        self.full = PageList("full", full_pages)
        self.swa = PageList("SWA", swa_pages)
        self.requests: dict[int, Request] = {}
        self.free_rows = list(range(max_requests - 1, -1, -1))

    def open(self) -> int:
        """A row for a request of no tokens.

        Raises:
            OutOfSlots: there is none.
        """
        if not self.free_rows:
            raise OutOfSlots(f"all {self._max_requests} request rows are in use")
        row = self.free_rows.pop()
        self.requests[row] = Request()
        return row

    def request(self, row: int) -> Request:
        """The request of a row.

        Raises:
            KeyError: there is none.
        """
        if row not in self.requests:
            raise KeyError(f"there is no open request {row}")
        return self.requests[row]

    def close(self, row: int) -> list[int]:
        """Free all that a request holds; the full pages that it had.

        Raises:
            KeyError: there is no such request.
        """
        state = self.request(row)
        self.full.give(reversed(state.full_pages))
        self.swa.give(reversed(state.swa_pages))
        del self.requests[row]
        self.free_rows.append(row)
        return state.full_pages

    def take(self, counts: Mapping[int, int], *, evict: bool) -> Taken:
        """Slots for so many new tokens of each request, which are evicted from first if `evict`.

        Raises:
            OutOfSlots, ValueError, KeyError: as `HybridKVPool.extend`; nothing was changed.
        """
        states = {request: self.request(request) for request in counts}
        self._refuse_what_does_not_fit(counts, states, evict=evict)
        taken = Taken()
        if evict:
            taken.full_pages += self.evict(states.values())
            taken.swa_pages += [0] * len(taken.full_pages)
        for request, tokens in counts.items():
            state = states[request]
            more = state.pages_for(tokens, self._page_size)
            new = self.full.take(more)
            state.full_pages += new
            if self._windows.largest is not None:
                taken.full_pages += new
                new = self.swa.take(more)
                state.swa_pages += new
                taken.swa_pages += new
            taken.rows += [request] * tokens
            taken.places += range(state.length, state.length + tokens)
            taken.slots += state.slots(state.length, tokens, self._page_size)
            state.length += tokens
        return taken

    def evict(self, states: Iterable[Request]) -> list[int]:
        """Give back SWA pages that no query sees any more; the full pages that had them."""
        full_pages: list[int] = []
        if self._windows.largest is None:
            return full_pages
        for state in states:
            count = self._evictable(state)
            self.swa.give(state.swa_pages[:count])
            del state.swa_pages[:count]
            full_pages += state.full_pages[state.evicted : state.evicted + count]
            state.evicted += count
        return full_pages

    def truncate(self, lengths: Mapping[int, int]) -> tuple[list[int], list[int], list[int]]:
        """Take tokens back, so that `lengths` of each request are left.

        Returns:
            Full pages that are free by that; request and position of each token that went.

        Raises:
            ValueError, KeyError: as `HybridKVPool.truncate`; nothing was changed.
        """
        for request, length in lengths.items():
            self._refuse_to_truncate(request, length)
        dropped: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for request, length in lengths.items():
            state = self.requests[request]
            rows += [request] * (state.length - length)
            places += range(length, state.length)
            full_pages, swa_pages = state.truncate(length, self._page_size)
            self.full.give(reversed(full_pages))
            self.swa.give(reversed(swa_pages))
            dropped += full_pages
        return dropped, rows, places

    def _evictable(self, state: Request) -> int:
        """How many further leading pages of a request no query can see any more."""
        return state.evictable(self._windows.first_seen(state.length), self._page_size)

    def _refuse_what_does_not_fit(
        self, counts: Mapping[int, int], states: Mapping[int, Request], *, evict: bool
    ) -> None:
        slides = self._windows.largest is not None
        wanted = freed = 0
        for request, tokens in counts.items():
            state = states[request]
            if tokens < 0:
                raise ValueError(f"request {request} cannot be extended by {tokens} tokens")
            if state.length + tokens > self._max_context:
                raise OutOfSlots(
                    f"request {request} has {state.length} tokens and cannot take {tokens} more: "
                    f"the context is {self._max_context}"
                )
            wanted += state.pages_for(tokens, self._page_size)
            if evict and slides:
                freed += self._evictable(state)
        for pool, has in ((self.full, self.full.free), (self.swa, self.swa.free + freed)):
            if pool is self.swa and not slides:
                continue
            if wanted > has:
                raise OutOfSlots(
                    f"the {pool.name} pool has {has} of {pool.pages} pages of {self._page_size} "
                    f"tokens free; {wanted} were wanted"
                )

    def _refuse_to_truncate(self, request: int, length: int) -> None:
        state = self.request(request)
        if not 0 <= length <= state.length:
            raise ValueError(
                f"request {request} has {state.length} tokens and cannot go back to {length}"
            )
        seen = self._windows.first_seen(length)
        if seen < state.evicted * self._page_size:
            raise ValueError(
                f"request {request} cannot go back to {length} tokens: its next query would see "
                f"position {seen}, which is evicted"
            )
