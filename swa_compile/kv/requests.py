"""What the pool knows of requests, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Request:
    """The pages of one request.

    Attributes:
        length: tokens that have slots.
        full_pages: full page of each logical page.
        swa_pages: SWA page of each logical page from `evicted` on.
        evicted: leading logical pages that gave their SWA page back.
    """

    length: int = 0
    full_pages: list[int] = field(default_factory=list)
    swa_pages: list[int] = field(default_factory=list)
    evicted: int = 0

    def pages_for(self, more: int, page_size: int) -> int:
        """How many further pages `more` tokens need."""
        return -(-(self.length + more) // page_size) - len(self.full_pages)

    def evictable(self, first_seen: int, page_size: int) -> int:
        """How many further leading pages no query can see any more.

        Args:
            first_seen: the first position that the next query, at position `length`, sees.
        """
        return first_seen // page_size - self.evicted

    def slots(self, start: int, count: int, page_size: int) -> list[int]:
        """Full slots of the positions `start ... start + count - 1`."""
        pages = self.full_pages
        return [
            pages[position // page_size] * page_size + position % page_size
            for position in range(start, start + count)
        ]

    def truncate(self, length: int, page_size: int) -> tuple[list[int], list[int]]:
        """Go back to `length` tokens; the full and SWA pages that are free by that."""
        pages = -(-length // page_size)
        full, swa = self.full_pages[pages:], self.swa_pages[pages - self.evicted :]
        del self.full_pages[pages:], self.swa_pages[pages - self.evicted :]
        self.length = length
        return full, swa


@dataclass
class Taken:
    """What the tables on the device are to say of new tokens, on the host.

    Attributes:
        full_pages: whose SWA page is another now.
        swa_pages: that page of each; 0 for none.
        rows, places, slots: request, position and full slot of each new token.
    """

    full_pages: list[int] = field(default_factory=list)
    swa_pages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
