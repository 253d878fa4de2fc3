"""Which pages of a pool are free, on the host."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfSlots(RuntimeError):
    """A pool, the request rows or a request's context is full; nothing was changed."""


class PoolCorrupt(AssertionError):
    """An invariant of the pool is broken: a bug of the pool, or of code that edits its tensors."""


class PageList:
    """The free pages of one pool. Page 0 is the sink and never handed out.

    Args:
        name: of the pool, for messages.
        pages: pages beside the sink: 1 ... pages.
    """

    def __init__(self, name: str, pages: int) -> None:
        self.name = name
        self.pages = pages
        # Popped from the end: a new pool hands out page 1 first.
        self._free = list(range(pages, 0, -1))

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def free_pages(self) -> tuple[int, ...]:
        """The free pages, each as often as it is listed: `check` looks for one that is twice."""
        return tuple(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages that were free.

        The caller has asked `free` before: several pools are taken from together or not at all.
        """
        assert count <= len(self._free), self.name
        taken = [self._free.pop() for _ in range(count)]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Make `pages` free again; the last given is the first handed out."""
        self._free.extend(pages)
