"""The rule of paged attention, and the forms in which devices follow it.

Vectorized, in float32, and on a GPU free of synchronizations. A query's keys are read and nothing
else: what other slots hold (NaN, say) and what other entries of the page table say has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import is_float8

# Gathered elements of K or V that one step of the row-by-row form may hold.
_CHUNK_ELEMENTS = 2**25

# Queries of one request that are attended to at once.
_QUERY_BLOCK = 256

# A slot that no cache has; reading it fails.
_NOWHERE = 2**62


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The rule of attention, on dense operands in float32.

    Args:
        q: `[R, n, H_q, D]`.
        k, v: `[R, T, H_kv, D]`, `[R, T, H_kv, D_v]`.
        visible: bool `[R, n, T]`: which keys a query sees.

    Returns:
        `[R, n, H_q, D_v]`, zeros where a query sees nothing.
    """
    rows, count, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(rows, count, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("rnhgd,rthd->rhgnt", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("rhgnt,rthd->rnhgd", weights, v).reshape(rows, count, heads, -1)


class Keys(NamedTuple):
    """Where keys lie and how they are attended to: what all queries of a call share.

    Attributes:
        rule: attends to dense operands, as `attend` does.
    """

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    page_size: int
    window: int | None
    scale: float
    softcap: float
    sinks: Tensor | None
    rule: Callable[..., Tensor] = attend

    def attend(self, q: Tensor, at: Tensor, requests: Tensor, key_at: Tensor) -> Tensor:
        """Attention of queries over the keys at given positions.

        Args:
            q: `[R, n, H_q, D]`.
            at: `[R, n]`, the queries' positions; negative for queries that see nothing.
            requests: `[R]`, whose keys they see.
            key_at: `[R, T]`, positions of keys; negative for none.

        Returns:
            float32 `[R, n, H_q, D_v]`.
        """
        visible = (key_at >= 0)[:, None] & (key_at[:, None] <= at[:, :, None])
        if self.window is not None:
            visible &= key_at[:, None] > at[:, :, None] - self.window
        seen = visible.any(1)
        page = (key_at.clamp_min(0) // self.page_size).clamp_max(self.page_table.shape[1] - 1)
        entry = self.page_table[requests[:, None], page].long()
        slot = entry * self.page_size + key_at % self.page_size
        # A key that is seen at a negative slot must not wrap around to the last rows.
        slot = torch.where(seen, slot.masked_fill(slot < 0, _NOWHERE), 0)
        unseen = ~seen[:, :, None, None]
        # Zeros, not only a weight of zero: 0 times NaN is NaN.
        k = _rows(self.k_cache, slot).masked_fill(unseen, 0.0)
        v = _rows(self.v_cache, slot).masked_fill(unseen, 0.0)
        return self.rule(
            q.float(), k, v, visible, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )

    def attend_rows(self, q: Tensor, at: Tensor, requests: Tensor, span: int) -> Tensor:
        """Each query over keys gathered for it alone: `[R, H_q, D]` to `[R, H_q, D_v]`.

        Args:
            span: no query stands at this position or further.
        """
        reach = span if self.window is None else min(span, self.window)
        width = self.k_cache.shape[1] * max(self.k_cache.shape[2], self.v_cache.shape[2])
        step = max(1, _CHUNK_ELEMENTS // max(1, reach * width))
        parts = []
        for start in range(0, q.shape[0], step):
            part = slice(start, start + step)
            key_at = torch.arange(reach, device=q.device).expand(at[part].shape[0], -1)
            if reach < span:
                key_at = at[part, None] - (reach - 1) + key_at
            parts.append(self.attend(q[part, None], at[part, None], requests[part], key_at)[:, 0])
        return torch.cat(parts)

    def attend_request(self, q: Tensor, first: int, request: int) -> Tensor:
        """The queries of one request, at positions `first` onwards, over keys gathered once."""
        parts = []
        for start in range(0, q.shape[0], _QUERY_BLOCK):
            part = q[start : start + _QUERY_BLOCK]
            at = torch.arange(first + start, first + start + part.shape[0], device=q.device)
            low = 0 if self.window is None else max(0, first + start - self.window + 1)
            key_at = torch.arange(low, int(at[-1]) + 1, device=q.device)
            requests = torch.tensor([request], device=q.device)
            parts.append(self.attend(part[None], at[None], requests, key_at[None])[0])
        return torch.cat(parts)


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    # On a CPU `cache[slots]` goes element by element, several times slower.
    if is_float8(cache.dtype):  # selecting knows no float8; its bytes are as good
        rows = cache.view(torch.uint8).index_select(0, slots.flatten()).view(cache.dtype)
    else:
        rows = cache.index_select(0, slots.flatten())
    return rows.unflatten(0, slots.shape).float()


def _positions(count: int, seq_lens: Tensor, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of `count` rows of q: its position (-1 where it sees nothing), and its request."""
    starts, lens = cu_seqlens_q.long(), seq_lens.long()
    row = torch.arange(count, device=starts.device)
    request = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, lens.shape[0] - 1)
    at = lens[request] - starts[request + 1] + row
    live = (row < starts[-1]) & (lens[request] > 0)
    return torch.where(live, at, -1), request


def attention_on_cpu(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Single queries (decode) in one batch, the others request by request."""
    shape = (q.shape[0], q.shape[1], keys.v_cache.shape[2])
    out = torch.zeros(shape, dtype=torch.float32, device=q.device)
    at, request = _positions(q.shape[0], seq_lens, cu_seqlens_q)
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    single = []
    for i, (start, end) in enumerate(pairwise(starts)):
        if lens[i] and end - start == 1:
            single.append(start)
        elif lens[i] and end > start:
            out[start:end] = keys.attend_request(q[start:end], lens[i] - (end - start), i)
    if single:
        span = int(at[single].max()) + 1
        out[single] = keys.attend_rows(q[single], at[single], request[single], span)
    return out


def attention_on_gpu(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Row by row over the longest span that the page table has room for: no size is read back."""
    at, request = _positions(q.shape[0], seq_lens, cu_seqlens_q)
    span = keys.page_table.shape[1] * keys.page_size
    torch._assert_async((at < span).all(), "swa::paged_attention: seq_lens exceed page_table")
    return keys.attend_rows(q, at, request, span)


@torch.no_grad()
def attention_by_device(
    q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor
) -> None:
    """Attention of `q` `[N, H_q, D]` over `keys` into `out` `[N, H_q, D_v]`."""
    form = attention_on_cpu if q.is_cpu else attention_on_gpu
    out.copy_(form(q, keys, seq_lens, cu_seqlens_q))
