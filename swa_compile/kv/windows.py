"""What the windows of a pool's layers keep of a request: which positions, in how many pages."""

from __future__ import annotations

from collections.abc import Sequence

from swa_compile.kv.layer_spec import LayerSpec


class Windows:
    """The sliding-window layers of a pool, together: they share their slots.

    Args:
        layers: all layers of the pool.
        page_size: tokens per page.

    Attributes:
        largest: the largest window; None where no layer slides.

    Raises:
        ValueError: for chunks that are no whole number of pages.
    """

    def __init__(self, layers: Sequence[LayerSpec], page_size: int) -> None:
        self._page_size = page_size
        self._specs = {spec for spec in layers if spec.kind == "swa"}
        self._chunks = [s.window for s in self._specs if s.window is not None and s.chunked]
        self.largest = max((s.window for s in self._specs if s.window is not None), default=None)
        for chunk in self._chunks:
            if chunk % page_size:
                raise ValueError(
                    f"HybridKVPool: chunks of {chunk} tokens are no whole number of pages of "
                    f"{page_size}"
                )

    def first_seen(self, position: int) -> int:
        """The first position whose SWA slot a query at `position` reads in some layer."""
        return min((spec.first_seen(position) for spec in self._specs), default=position)

    def pages_bound(self, extend: int) -> int:
        """Most SWA pages that a request can hold while it is extended by `extend` tokens.

        Evicted first, it keeps what the next query sees, `largest - 1` tokens, which with the new
        ones may begin and end inside a page.
        """
        if self.largest is None:
            return 0
        return -(-(self.largest - 1 + extend) // self._page_size) + 1

    def room_in_chunks(self, length: int) -> int | None:
        """Tokens up to the next end of a chunk behind `length` tokens; None without chunks."""
        return min((chunk - length % chunk for chunk in self._chunks), default=None)
