"""Index arithmetic by token, where a page table goes by request."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_compile.kv import ForwardBatch


def request_of_tokens(batch: ForwardBatch) -> Tensor:
    """The request of each token, int64 `[N]`; that of padding is some request."""
    offsets = batch.cu_seqlens_q
    tokens = torch.arange(batch.positions.shape[0], device=offsets.device, dtype=offsets.dtype)
    found = torch.searchsorted(offsets, tokens, right=True) - 1
    return found.clamp_max(batch.seq_lens.shape[0] - 1)


def live_tokens(batch: ForwardBatch) -> Tensor:
    """Which tokens are no padding, bool `[N]`."""
    offsets = batch.cu_seqlens_q
    return torch.arange(batch.positions.shape[0], device=offsets.device) < offsets[-1]


def slots_at(page_table: Tensor, requests: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots of `positions` of `requests`, int64, broadcast; positions below 0 are taken for 0.

    Args:
        page_table: `[B, P]`, of the pool in which the slots are wanted.
    """
    positions = positions.clamp_min(0)
    columns = (positions // page_size).clamp_max(page_table.shape[1] - 1)
    pages = page_table[requests, columns].long()
    return pages * page_size + positions % page_size
