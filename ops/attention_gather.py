"""Paged attention over gathered keys: what runs where no kernel reads the caches in place.

On a GPU vectorized and free of synchronizations; on a CPU request by request, which reads lengths
and gathers no key that is not seen. A query's keys are read and nothing else: what other slots hold
(NaN, say) and what other entries of the page table say has no effect.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .attention_reference import Keys

# Gathered elements of K or V that one step on a GPU may hold.
_CHUNK_ELEMENTS = 2**25

# The same on a CPU for requests that are attended to together: more would leave its caches.
_GROUP_ELEMENTS = 2**17

# Queries of one request that are attended to at once.
_QUERY_BLOCK = 256

# A slot that no cache has; reading it fails.
_NOWHERE = 2**62


def attention_on_cpu(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Single queries (decode) together where they see equally many keys, others by request."""
    shape = (q.shape[0], q.shape[1], keys.v_cache.shape[2])
    out = torch.zeros(shape, dtype=torch.float32, device=q.device)
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    single: dict[int, list[int]] = {}
    for request, (start, end) in enumerate(pairwise(starts)):
        length = lens[request]
        if length and end - start == 1:
            seen = length if keys.window is None else min(length, keys.window)
            single.setdefault(seen, []).append(request)
        elif length and end > start:
            _attend_request(q[start:end], keys, request, length - (end - start), out[start:end])
    width = keys.k_cache.shape[1] * max(keys.k_cache.shape[2], keys.v_cache.shape[2])
    for seen, requests in single.items():
        step = max(1, _GROUP_ELEMENTS // (seen * width))
        for i in range(0, len(requests), step):
            group = requests[i : i + step]
            slots = [_slots(keys, request, lens[request] - seen, seen) for request in group]
            rows = _index([starts[request] for request in group], q.device)
            out[rows] = keys.attend(q[rows][:, None], torch.stack(slots))[:, 0]
    return out


def _attend_request(q: Tensor, keys: Keys, request: int, first: int, out: Tensor) -> None:
    """The queries of one request, at positions `first` onwards."""
    for start in range(0, q.shape[0], _QUERY_BLOCK):
        part = q[start : start + _QUERY_BLOCK]
        at = first + start
        low = 0 if keys.window is None else max(0, at - keys.window + 1)
        slots = _slots(keys, request, low, at + part.shape[0] - low)
        # Of a query at `at + i` and a key at `low + j`: how far the key lies behind.
        behind = torch.arange(at - low, at - low + part.shape[0], device=q.device)[:, None]
        behind = behind - torch.arange(slots.shape[0], device=q.device)
        visible = behind >= 0
        if keys.window is not None:
            visible &= behind < keys.window
        got = keys.attend(part[None], slots[None], visible=visible[None])
        out[start : start + _QUERY_BLOCK] = got[0]


def _slots(keys: Keys, request: int, first: int, count: int) -> Tensor:
    """Int64 `[count]`: where the keys of a request lie, from position `first` on."""
    size = keys.page_size
    entries = keys.page_table[request, first // size : -(-(first + count) // size)].long()
    if size == 1:
        return entries
    slots = (entries[:, None] * size + torch.arange(size, device=entries.device)).flatten()
    return slots[first % size : first % size + count]


def _index(rows: list[int], device: torch.device) -> slice | Tensor:
    """Ascending rows, as a slice where they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def attention_on_gpu(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Each query over keys gathered for it alone, over the longest span that its page table has.

    No size is read back.
    """
    at, request = _positions(q.shape[0], seq_lens, cu_seqlens_q)
    span = keys.page_table.shape[1] * keys.page_size
    torch._assert_async((at < span).all(), "swa::paged_attention: seq_lens exceed page_table")
    reach = span if keys.window is None else min(span, keys.window)
    width = keys.k_cache.shape[1] * max(keys.k_cache.shape[2], keys.v_cache.shape[2])
    step = max(1, _CHUNK_ELEMENTS // max(1, reach * width))
    parts = []
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        key_at = torch.arange(reach, device=q.device).expand(at[part].shape[0], -1)
        if reach < span:
            key_at = at[part, None] - (reach - 1) + key_at
        seen = (key_at >= 0) & (key_at <= at[part, None])
        slots = _slots_at(keys, request[part], key_at, seen)
        got = keys.attend(q[part, None], slots, visible=seen[:, None], seen=seen)
        parts.append(got[:, 0])
    return torch.cat(parts)


def _positions(count: int, seq_lens: Tensor, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of `count` rows of q: its position (-1 where it sees nothing), and its request."""
    starts, lens = cu_seqlens_q.long(), seq_lens.long()
    row = torch.arange(count, device=starts.device)
    request = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, lens.shape[0] - 1)
    at = lens[request] - starts[request + 1] + row
    live = (row < starts[-1]) & (lens[request] > 0)
    return torch.where(live, at, -1), request


def _slots_at(keys: Keys, requests: Tensor, key_at: Tensor, seen: Tensor) -> Tensor:
    """Int64 `[R, T]`: slots of keys at positions `key_at`; 0, the sink, for those not seen."""
    page = (key_at.clamp_min(0) // keys.page_size).clamp_max(keys.page_table.shape[1] - 1)
    entry = keys.page_table[requests[:, None], page].long()
    slots = entry * keys.page_size + key_at % keys.page_size
    # A key that is seen at a negative slot must not wrap around to the last rows.
    return torch.where(seen, slots.masked_fill(slots < 0, _NOWHERE), 0)


@torch.no_grad()
def attention_by_device(
    q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor
) -> None:
    """Attention of `q` `[N, H_q, D]` over `keys` into `out` `[N, H_q, D_v]`."""
    form = attention_on_cpu if q.is_cpu else attention_on_gpu
    out.copy_(form(q, keys, seq_lens, cu_seqlens_q))
