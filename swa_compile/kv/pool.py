"""The hybrid KV pool: static buffers on the device, slot bookkeeping on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import index

import torch
from torch import Tensor

from swa_compile.kv.batch import ForwardBatch, refuse_to_shrink
from swa_compile.kv.host import lists_on_device, on_device
from swa_compile.kv.invariants import check
from swa_compile.kv.layer_spec import LayerSpec
from swa_compile.kv.ledger import Ledger
from swa_compile.kv.slot_tables import SlotTables
from swa_compile.kv.windows import Windows


class HybridKVPool(SlotTables):
    """KV caches of a model that mixes full and sliding-window layers.

    Full layers keep every token in the full pool; sliding-window layers keep the last `window`
    tokens of each request in the SWA pool. A token is known by its *full* slot, and
    `full_to_swa_index_mapping` gives its SWA slot. Slot 0 (page 0) of each pool is the sink.

    All tensors are buffers whose addresses never change, so compiled code and CUDA graphs may
    hold on to them. Slots are handed out on the host; the device is only written, never asked.

    Args:
        layers: one spec per layer, in order.
        max_tokens: capacity of the full pool over all requests, rounded up to whole pages.
        max_requests: requests that can be open at once.
        max_context: tokens that one request can have; default `max_tokens`.
        swa_tokens: capacity of the SWA pool, rounded up to whole pages. The default suffices for
            `max_requests` requests that extend by up to a window of tokens at a time, or by
            `max_extend`, if that is more.
        page_size: tokens per page.
        max_extend: see `swa_tokens`.
        dtype, device: of the caches.

    Raises:
        ValueError: for a size below 1, more full slots than int32 can name, no layers, or chunks
            that are no whole number of pages.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        max_tokens: int,
        max_requests: int,
        max_context: int | None = None,
        swa_tokens: int | None = None,
        page_size: int = 1,
        max_extend: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not layers:
            raise ValueError("HybridKVPool wants at least one layer; got none")
        max_context = max_tokens if max_context is None else max_context
        sizes = {
            "max_tokens": max_tokens,
            "max_requests": max_requests,
            "max_context": max_context,
            "page_size": page_size,
            "max_extend": max_extend,
            "swa_tokens": 1 if swa_tokens is None else swa_tokens,
        }
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"HybridKVPool: {name} is an int of at least 1; got {value!r}")
        windows = Windows(layers, page_size)
        full_pages = -(-max_tokens // page_size)
        if (full_pages + 1) * page_size > 2**31:
            raise ValueError(
                f"HybridKVPool: req_to_token is int32 and cannot name the slots of {max_tokens} "
                f"tokens in pages of {page_size}"
            )
        swa_pages = 0
        if windows.largest is not None and swa_tokens is not None:
            swa_pages = -(-swa_tokens // page_size)
        elif windows.largest is not None:
            each = windows.pages_bound(max(windows.largest, max_extend))
            swa_pages = min(full_pages, max_requests * each)
        super().__init__(
            layers,
            full_tokens=full_pages * page_size,
            swa_tokens=swa_pages * page_size,
            page_size=page_size,
            max_requests=max_requests,
            max_context=max_context,
            dtype=dtype,
            device=device,
        )
        self.window = windows.largest
        self._windows = windows
        self._ledger = Ledger(
            windows,
            page_size=page_size,
            full_pages=full_pages,
            swa_pages=swa_pages,
            max_requests=max_requests,
            max_context=max_context,
        )

    # ---- room, in tokens --------------------------------------------------------------------

    @property
    def full_free(self) -> int:
        """Free slots of the full pool; a page that is partly used is not free."""
        return self._ledger.full.free * self.page_size

    @property
    def swa_free(self) -> int:
        """Free slots of the SWA pool; a page that is partly used is not free."""
        return self._ledger.swa.free * self.page_size

    def swa_pages_bound(self, extend: int) -> int:
        """Most SWA pages that a request can hold while it is extended by `extend` tokens."""
        return self._windows.pages_bound(extend)

    def first_seen(self, position: int) -> int:
        """The first position whose SWA slot a query at `position` reads in some layer."""
        return self._windows.first_seen(position)

    def piece_bound(self, request: int) -> int | None:
        """Most tokens by which `request` can be extended in one batch, by its chunked layers.

        All new tokens of a request see the same chunk, so a batch ends at the chunk's end. None
        where no layer is chunked.

        Raises:
            KeyError: there is no such request.
        """
        return self._windows.room_in_chunks(self._ledger.request(request).length)

    # ---- the life of a request --------------------------------------------------------------

    def open(self) -> int:
        """Open a request; its id, a row of `req_to_token`.

        Raises:
            OutOfSlots: `max_requests` are open.
        """
        return self._ledger.open()

    def length(self, request: int) -> int:
        """Tokens of `request` that have slots."""
        return self._ledger.request(request).length

    def extend(self, request: int, tokens: int) -> Tensor:
        """Give `request` slots for `tokens` more; their full slots, int64 `[tokens]`.

        Raises:
            OutOfSlots: a pool or the request's context is too small; nothing was changed.
            ValueError: `tokens` is negative. TypeError: it is no integer. KeyError: there is no
                such request.
        """
        # As an int: a NumPy integer would stay in the request's length and in what comes of it.
        taken = self._ledger.take({request: index(tokens)}, evict=False)
        return self._write(taken)[0].clone()

    def evict(self, request: int) -> int:
        """Give back the SWA pages that no later query can see; how many tokens that freed.

        Raises:
            KeyError: there is no such request.
        """
        pages = self._ledger.evict([self._ledger.request(request)])
        self._map(pages, [0] * len(pages))
        return len(pages) * self.page_size

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Take the last tokens of requests back, so that `lengths` of them are left, and free them.

        What a later query sees is still there: tokens that were evicted do not come back, so a
        request goes back as far as the length at which it was last extended by `batch`, and no
        further than its windows allow.

        Raises:
            ValueError: a request has fewer tokens, or the next query would see an evicted one.
            TypeError: a length is no integer. KeyError: there is no such request. Nothing was
                changed then.
        """
        wanted = {request: index(length) for request, length in lengths.items()}
        dropped, rows, places = self._ledger.truncate(wanted)
        if not rows:
            return
        self._map(dropped, [0] * len(dropped))
        self._forget(rows, places)

    def close(self, request: int) -> None:
        """End `request` and free all its slots.

        Raises:
            KeyError: there is no such request (it may have been closed before).
        """
        pages = self._ledger.close(request)
        self._map(pages, [0] * len(pages))
        self.req_to_token[request].zero_()

    def batch(
        self,
        pieces: Mapping[int, Sequence[int]] | Sequence[tuple[int, Sequence[int]]],
        *,
        width: int | None = None,
        pad_to: tuple[int, int] | None = None,
    ) -> ForwardBatch:
        """Slots and index tensors for one forward: evict, extend, describe.

        Args:
            pieces: new token ids of each request; none twice. All are extended, or none.
            width: columns of the page table; default: the least power of two that suffices, so
                that a growing request changes the shape seldom.
            pad_to: tokens and requests to pad to, as `ForwardBatch.pad` does.

        Returns:
            The batch, on the pool's device. No pieces give a batch of N = 0, B = 0.

        Raises:
            OutOfSlots: as `extend`.
            ValueError: a request stands twice, `width` or `pad_to` is too small, a piece passes a
                chunk's end (see `piece_bound`), or an id is not in int64. TypeError: an id, `width`
                or `pad_to` is no integer. KeyError: unknown request.
            Nothing was changed then.
        """
        items = list(pieces.items()) if isinstance(pieces, Mapping) else list(pieces)
        counts = {request: len(ids) for request, ids in items}
        if len(counts) != len(items):
            raise ValueError("a request stands twice in one batch")
        lengths = {request: self.length(request) + n for request, n in counts.items()}
        for request, n in counts.items():
            bound = self.piece_bound(request)
            if bound is not None and n > bound:
                raise ValueError(
                    f"request {request} is {bound} tokens ahead of the end of a chunk and cannot "
                    f"be extended by {n} in one batch"
                )
        width = self._table_width(lengths.values(), width)
        # All that can fail comes before the pool changes. `torch.tensor` would truncate floats.
        input_ids = [index(i) for _, ids in items for i in ids]
        _refuse_beyond_int64(input_ids)
        tokens, requests = len(input_ids), len(items)
        if pad_to is not None:
            to_tokens, to_requests = map(index, pad_to)
            refuse_to_shrink(tokens, requests, to_tokens, to_requests)
        taken = self._ledger.take(counts, evict=True)
        loc, positions, ids, rows = self._write(taken, input_ids, list(counts))
        ends = list(accumulate(counts.values(), initial=0))
        lens, offsets = lists_on_device([list(lengths.values()), ends], torch.int32, self._device)
        # Copies: a view would tell by its offset of the sizes of all, which compiled code guards.
        batch = ForwardBatch(
            input_ids=ids.clone(),
            positions=positions.clone(),
            out_cache_loc=loc.clone(),
            page_table=self._page_table(rows, width),
            seq_lens=lens.clone(),
            cu_seqlens_q=offsets.clone(),
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
        )
        return batch if pad_to is None else batch.pad(to_tokens, to_requests)

    def page_table(self, requests: Sequence[int], width: int | None = None) -> Tensor:
        """Full page ids of `requests`, int32 `[B, width]`, 0 past the live pages.

        Raises:
            ValueError: `width` is too small. TypeError: it is no integer. KeyError: there is no
                such request.
        """
        width = self._table_width([self.length(request) for request in requests], width)
        return self._page_table(on_device(list(requests), torch.int64, self._device), width)

    def check(self) -> None:
        """Raise `PoolCorrupt` where an invariant is broken; reads the device, for debugging."""
        check(self)

    def _table_width(self, lengths: Iterable[int], width: int | None) -> int:
        longest = max(lengths, default=0)
        needed = -(-longest // self.page_size)
        if width is None:
            return 1 << max(needed - 1, 0).bit_length()
        width = index(width)
        if width < needed:
            raise ValueError(f"a page table of width {width} cannot hold {needed} pages")
        return width


def _refuse_beyond_int64(ids: Sequence[int]) -> None:
    if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
        wrong = next(i for i in ids if not -(2**63) <= i < 2**63)
        raise ValueError(f"token id {wrong} is not in int64")
