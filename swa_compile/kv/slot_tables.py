"""The index tables of a hybrid pool on the device: which rows of the caches a token has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from swa_compile.kv.caches import KVCaches
from swa_compile.kv.host import lists_on_device
from swa_compile.kv.layer_spec import LayerSpec
from swa_compile.kv.requests import Taken


class SlotTables(KVCaches):
    """Caches, and the tables that say where each token's rows are.

    The host writes them and never asks them: what it knows is in its own lists.

    Args:
        layers, caches: of `KVCaches`.
        max_requests, max_context: rows and columns of `req_to_token`.
    """

    full_to_swa_index_mapping: Tensor  # int64 [full_tokens + page_size + 1], -1 last
    req_to_token: Tensor  # int32 [max_requests, max_context]: full slot of each position

    def __init__(
        self, layers: Sequence[LayerSpec], *, max_requests: int, max_context: int, **caches: Any
    ) -> None:
        super().__init__(layers, **caches)
        self.max_requests, self.max_context = max_requests, max_context
        size, device = self.full_tokens + self.page_size + 1, caches["device"]
        mapping = torch.zeros(size, dtype=torch.int64, device=device)
        mapping[-1] = -1
        self.register_buffer("full_to_swa_index_mapping", mapping, persistent=False)
        table = torch.zeros(max_requests, max_context, dtype=torch.int32, device=device)
        self.register_buffer("req_to_token", table, persistent=False)

    def _page_table(self, requests: Tensor, width: int) -> Tensor:
        """Full page ids of `requests`, int64 `[B]`: int32 `[B, width]`."""
        # Read off on the device: as Python lists, long contexts take many milliseconds a step.
        first = self.req_to_token[:, :: self.page_size][:, :width]
        table = first.index_select(0, requests)
        if self.page_size > 1:
            table = table // self.page_size
        missing = width - table.shape[1]
        return F.pad(table, (0, missing)) if missing else table

    def _write(self, taken: Taken, *lists: Sequence[int]) -> tuple[Tensor, ...]:
        """Full slots and positions of the new tokens, and `lists`: int64 views of one memory.

        One copy and two launches, however many requests there are.
        """
        mapped = self._mapped(taken.full_pages, taken.swa_pages)
        lists = (*mapped, taken.rows, taken.slots, taken.places, *lists)
        where, values, rows, *rest = lists_on_device(lists, torch.int64, self._device)
        self._put(where, values)
        loc, positions = rest[:2]
        self.req_to_token.index_put_((rows, positions), loc.to(torch.int32))
        return tuple(rest)

    def _forget(self, requests: Sequence[int], positions: Sequence[int]) -> None:
        """Name no slot for these positions of the requests."""
        where = lists_on_device([requests, positions], torch.int64, self._device)
        self.req_to_token.index_put_(where, self.req_to_token.new_zeros(()))

    def _map(self, full_pages: Sequence[int], swa_pages: Sequence[int]) -> None:
        """Point the slots of each full page at those of its SWA page; SWA page 0: at none."""
        if full_pages:
            mapped = self._mapped(full_pages, swa_pages)
            self._put(*lists_on_device(mapped, torch.int64, self._device))

    def _mapped(self, full_pages: Sequence[int], swa_pages: Sequence[int]) -> tuple[list[int], ...]:
        """Slots of the full pages, and the SWA slot of each."""
        within = range(self.page_size)
        full = [page * self.page_size + i for page in full_pages for i in within]
        swa = [page and page * self.page_size + i for page in swa_pages for i in within]
        return full, swa

    def _put(self, where: Tensor, values: Tensor) -> None:
        if len(where):
            self.full_to_swa_index_mapping.index_put_((where,), values)

    @property
    def _device(self) -> torch.device:
        return self.full_to_swa_index_mapping.device
