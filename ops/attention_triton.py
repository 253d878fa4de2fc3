"""Paged attention as Triton kernels: decode with split keys, extend with ragged queries.

The rule stands in `attention_reference`. One kernel serves both: a program takes a block of one
request's queries, with all query heads of one KV head, and walks over a range of its keys
(FlashAttention-2, arXiv:2307.08691). Where there are too few queries to fill the card the keys
are split over several programs and a second kernel merges what they found (Flash-Decoding).

No size is read back to the host, so the launch can be captured: the grid holds room for every way
in which N queries can fall into B requests, and a program that finds no work ends.

`swa::paged_attention` does not choose it yet: it agrees with the rule in Triton's interpreter, and
has not been measured on a card.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_reference import Keys

_KEYS_PER_TILE = 64
_MAX_SPLITS = 64


# tl.max and tl.sum are kernels of Triton's own, decorated when Triton is imported: a process that
# has Triton loaded could not interpret what calls them.
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _find_request(cu_seqlens_q, requests, block, QUERIES: tl.constexpr):
    """The request whose blocks hold `block`: the last with cu[b] // QUERIES + b <= block.

    Each request gets one block more than its share, so that no two requests meet in one. Past the
    last request stands one that holds the rows of q behind all queries.
    """
    low, high = 0, requests
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens_q + middle).to(tl.int32) // QUERIES + middle
        if first <= block:
            low = middle
        else:
            high = middle - 1
    return low


# Sizes that change from call to call must not make a kernel of their own.
@triton.jit(do_not_specialize=["tokens", "requests"])
def _attend(
    out,
    out_token,
    out_head,
    partial,
    partial_top,
    partial_total,
    q,
    q_token,
    q_head,
    q_dim,
    k_cache,
    k_row,
    k_head,
    k_dim,
    v_cache,
    v_row,
    v_head,
    v_dim,
    page_table,
    table_row,
    table_column,
    seq_lens,
    cu_seqlens_q,
    sinks,
    tokens,
    requests,
    heads,
    scale,
    softcap,
    window,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    request = _find_request(cu_seqlens_q, requests, block, QUERIES)
    inside = request < requests
    begin = tl.load(cu_seqlens_q + request).to(tl.int32)
    following = tl.load(cu_seqlens_q + request + 1, mask=inside, other=0).to(tl.int32)
    end = tl.where(inside, following, tokens)
    length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
    first = (block - (begin // QUERIES + request)) * QUERIES  # of the request's queries
    if begin + first >= end:
        return

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    live = (row < QUERIES * GROUP) & (begin + query < end)
    token = (begin + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    at = length - (end - begin) + query  # the queries' positions

    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    dim_out = tl.arange(0, BLOCK_DIM_V).to(tl.int64)
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :] * q_dim,
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    weighted = tl.full((ROWS, BLOCK_DIM_V), 0.0, tl.float32)

    # Keys that any query of the block sees, in whole tiles, this split's share of them.
    last = length - (end - begin) + tl.minimum(first + QUERIES, end - begin)
    last = tl.maximum(0, tl.minimum(length, last))
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(0, length - (end - begin) + first - window + 1)
    tile = lowest // KEYS
    tiles = (last + KEYS - 1) // KEYS
    share = (tiles - tile + SPLITS - 1) // SPLITS
    start = tile + split * share
    for i in range(start, tl.minimum(start + share, tiles)):
        key = i * KEYS + tl.arange(0, KEYS)
        near = (key >= lowest) & (key < last)
        entry = page_table + request.to(tl.int64) * table_row + (key // PAGE) * table_column
        page = tl.load(entry, mask=near, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        # What no query sees is not read: it may be anything, and 0 times NaN is NaN.
        k = tl.load(
            k_cache + slot[None, :] * k_row + kv_head * k_head + dim[:, None] * k_dim,
            mask=near[None, :] & (dim < DIM)[:, None],
            other=0.0,
        ).to(queries.dtype)
        scores = tl.dot(queries, k, input_precision=PRECISION) * scale
        if SOFTCAP:
            # tanh(x) as 1 - 2 / (exp(2x) + 1), which neither overflows nor needs a library
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = near[None, :] & (key[None, :] <= at[:, None]) & live[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.reduce(scores, 1, _larger))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - reference[:, None])
        shrink = tl.exp(top - reference)
        total = total * shrink + tl.reduce(weights, 1, _plus)
        v = tl.load(
            v_cache + slot[:, None] * v_row + kv_head * v_head + dim_out[None, :] * v_dim,
            mask=near[:, None] & (dim_out < DIM_V)[None, :],
            other=0.0,
        ).to(queries.dtype)
        weighted = weighted * shrink[:, None]
        weighted += tl.dot(weights.to(queries.dtype), v, input_precision=PRECISION)
        top = new_top

    written = live[:, None] & (dim_out < DIM_V)[None, :]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32)
            sink = tl.where(length > 0, sink, float("-inf"))
            new_top = tl.maximum(top, sink)
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp(top - reference)
            weighted = weighted * shrink[:, None]
            total = total * shrink + tl.exp(sink - reference)
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + token[:, None] * out_token + head[:, None] * out_head + dim_out[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=written)
    else:
        place = (split.to(tl.int64) * tokens + token) * heads + head
        tl.store(partial + place[:, None] * DIM_V + dim_out[None, :], weighted, mask=written)
        tl.store(partial_top + place, top, mask=live)
        tl.store(partial_total + place, total, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    out,
    out_token,
    out_head,
    partial,
    partial_top,
    partial_total,
    sinks,
    tokens,
    heads,
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_DIM_V)
    place = (split.to(tl.int64) * tokens + token) * heads + head
    tops = tl.load(partial_top + place, mask=split < SPLITS, other=float("-inf"))
    totals = tl.load(partial_total + place, mask=split < SPLITS, other=0.0)
    top = tl.reduce(tops, 0, _larger)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        sink = tl.where(top == float("-inf"), float("-inf"), sink)  # a row that sees no key
        top = tl.maximum(top, sink)
    reference = tl.where(top == float("-inf"), 0.0, top)
    factors = tl.exp(tops - reference)
    total = tl.reduce(totals * factors, 0, _plus)
    if SINKS:
        total += tl.exp(sink - reference)
    parts = tl.load(
        partial + place[:, None] * DIM_V + dim[None, :],
        mask=(split < SPLITS)[:, None] & (dim < DIM_V)[None, :],
        other=0.0,
    )
    result = tl.reduce(parts * factors[:, None], 0, _plus) / tl.where(total == 0.0, 1.0, total)
    target = out + token * out_token + head * out_head + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < DIM_V)


def attention(
    q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, splits: int | None = None
) -> Tensor:
    """Attention of `q` `[N, H_q, D]` over `keys`; `[N, H_q, D_v]` in q's dtype.

    Scores and sums are float32, products of q's dtype. Sizes and dtypes have been checked.

    Args:
        splits: into how many parts the keys of a request are split; None chooses by the sizes.
    """
    tokens, heads, dim = q.shape
    kv_heads, dim_v = keys.k_cache.shape[1], keys.v_cache.shape[2]
    out = torch.empty((tokens, heads, dim_v), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    requests = seq_lens.shape[0]
    group = heads // kv_heads
    # tl.dot wants 16 rows; a batch with more queries than requests fills more of them.
    rows = max(16, triton.next_power_of_2(group))
    if tokens > 2 * requests:
        rows = max(rows, 64)
    queries = rows // group
    blocks = triton.cdiv(tokens, queries) + requests + 1
    if splits is None:
        splits = _split_count(blocks * kv_heads, keys, tokens - requests + 1, q.device)
    partial = q.new_empty((splits if splits > 1 else 0, tokens, heads, dim_v), dtype=torch.float32)
    tops = q.new_empty((2, *partial.shape[:3]), dtype=torch.float32)
    window = 0 if keys.window is None else keys.window
    common = {
        "DIM_V": dim_v,
        "BLOCK_DIM_V": max(16, triton.next_power_of_2(dim_v)),
        "SPLITS": splits,
        "SINKS": keys.sinks is not None,
    }
    _attend[(blocks, kv_heads, splits)](
        out,
        *out.stride()[:2],
        partial,
        tops[0],
        tops[1],
        q,
        *q.stride(),
        keys.k_cache,
        *keys.k_cache.stride(),
        keys.v_cache,
        *keys.v_cache.stride(),
        keys.page_table,
        *keys.page_table.stride(),
        seq_lens,
        cu_seqlens_q,
        keys.sinks,
        tokens,
        requests,
        heads,
        keys.scale,
        keys.softcap,
        window,
        PAGE=keys.page_size,
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        KEYS=_KEYS_PER_TILE,
        DIM=dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
        WINDOW=keys.window is not None,
        SOFTCAP=keys.softcap != 0.0,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        **common,
    )
    if splits > 1:
        _merge[(tokens, heads)](
            out,
            *out.stride()[:2],
            partial,
            tops[0],
            tops[1],
            keys.sinks,
            tokens,
            heads,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            **common,
        )
    return out


def _split_count(programs: int, keys: Keys, most_queries: int, device: torch.device) -> int:
    """So many that the card is filled about twice, and each split has a tile at least.

    By sizes alone: a length that the device holds would take a synchronization.
    """
    reach = keys.page_table.shape[1] * keys.page_size
    if keys.window is not None:
        reach = min(reach, keys.window + most_queries)
    wanted = 2 * _multiprocessors(device) // max(1, programs)
    return max(1, min(wanted, triton.cdiv(reach, _KEYS_PER_TILE), _MAX_SPLITS))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
