"""Paged attention as Triton kernels: decode with split keys, extend with ragged queries.

The rule stands in `attention_reference`, the choice of tile sizes in `attention_tuning`. One kernel
serves both: a program takes a block of one request's queries, with all query heads of one KV head,
and walks over a range of its keys (FlashAttention-2, arXiv:2307.08691). Where there are too few
queries to fill the card the keys are split over several programs and a second kernel merges what
they found (Flash-Decoding).

No size is read back to the host, so the launch can be captured. With no more queries than requests
a program takes one query, which in decode is the request of the same number; else the grid holds
room for every way in which N queries can fall into B requests, and a program that finds no work
ends. An id outside the caches stops the device; what it names is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """The request whose blocks hold `block`: the last that begins at or before it.

    With one query per block that is the last with cu[b] <= block. With more, each request gets one
    block more than its share, cu[b] // QUERIES + b <= block, so that no two meet in one. Past the
    last request stands one that holds the rows of q behind all queries.
    """
    low, high = 0, requests
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens_q + middle).to(tl.int32)
        if QUERIES > 1:
            first = first // QUERIES + middle
        if first <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _take_in(
    top,
    total,
    weighted,
    wrong,
    first_key,
    lowest,
    last,
    queries,
    at,
    k_cache,
    v_cache,
    page_table,
    rows,
    multiplier,
    cap,
    window,
    K_ROW: tl.constexpr,
    K_DIM: tl.constexpr,
    V_ROW: tl.constexpr,
    V_DIM: tl.constexpr,
    TABLE_COLUMN: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tile of keys from `first_key` on; unless MASKED every query sees all of them."""
    key = first_key + tl.arange(0, KEYS)
    near = (key >= lowest) & (key < last)
    if PAGE % KEYS == 0:  # the tile lies in one page
        page = tl.load(page_table + (first_key // PAGE) * TABLE_COLUMN)
    elif MASKED:
        page = tl.load(page_table + (key // PAGE) * TABLE_COLUMN, mask=near, other=0)
    else:
        page = tl.load(page_table + (key // PAGE) * TABLE_COLUMN)
    slot = page.to(tl.int64) * PAGE + key % PAGE
    outside = (slot < 0) | (slot >= rows)
    if MASKED:
        outside = outside & near
    wrong = wrong | outside.to(tl.int32)
    slot = tl.where(outside, 0, slot)

    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    k_at = k_cache + (slot * K_ROW)[:, None] + dim * K_DIM
    # What no query sees is not read: it may be anything, and 0 times NaN is NaN.
    if MASKED:
        k = tl.load(k_at, mask=near[:, None] & (dim < DIM), other=0.0)
    elif DIM < BLOCK_DIM:
        k = tl.load(k_at, mask=dim < DIM, other=0.0)
    else:
        k = tl.load(k_at)
    scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)
    # To base 2: the multiplier holds the scale and log2(e).
    if SOFTCAP:
        # tanh(x) as 1 - 2 / (exp(2x) + 1), which neither overflows nor needs a library
        scores = cap - (2.0 * cap) / (tl.exp2(scores * multiplier) + 1.0)
    else:
        scores = scores * multiplier
    if MASKED:
        seen = near[None, :] & (key[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))

    new_top = tl.maximum(top, tl.reduce(scores, 1, _larger))
    reference = new_top
    if MASKED:
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.reduce(weights, 1, _plus)

    dim_v = tl.arange(0, BLOCK_DIM_V).to(tl.int64)[None, :]
    v_at = v_cache + (slot * V_ROW)[:, None] + dim_v * V_DIM
    if MASKED:
        v = tl.load(v_at, mask=near[:, None] & (dim_v < DIM_V), other=0.0)
    elif DIM_V < BLOCK_DIM_V:
        v = tl.load(v_at, mask=dim_v < DIM_V, other=0.0)
    else:
        v = tl.load(v_at)
    weighted = weighted * shrink[:, None]
    weighted = tl.dot(
        weights.to(queries.dtype), v.to(queries.dtype), weighted, input_precision=PRECISION
    )
    return new_top, total, weighted, wrong


# Sizes that change from call to call must not make a kernel of their own. `debug` turns device
# assertions on; the launch turns those off that it would add to all arithmetic.
@triton.jit(
    debug=True,
    do_not_specialize=["tokens", "requests", "columns", "table_row", "rows", "window"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_seqlens_q", "sinks"],
)
def attend(
    out,
    partial,
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    cu_seqlens_q,
    sinks,
    tokens,
    requests,
    columns,
    table_row,
    rows,
    multiplier,
    cap,
    window,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_DIM: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_DIM: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_DIM: tl.constexpr,
    TABLE_COLUMN: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`[tokens, HEADS, DIM_V]` into `out`, or with SPLITS > 1 what `merge` needs into `partial`.

    Grid: (blocks of queries, KV heads, SPLITS). `multiplier` and `cap` are to base 2.
    """
    block, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    if QUERIES == 1:
        # Decode: the request of the same number, unless its offsets say otherwise. The length is
        # loaded beside them: each load that waits for another costs the latency of the memory.
        ordinary = block < requests
        request = block
        begin = tl.load(cu_seqlens_q + block, mask=ordinary, other=-1).to(tl.int32)
        end = tl.load(cu_seqlens_q + block + 1, mask=ordinary, other=-1).to(tl.int32)
        length = tl.load(seq_lens + block, mask=ordinary, other=0).to(tl.int32)
        if (begin != block) | (end != block + 1):
            request = _find_request(cu_seqlens_q, requests, block, QUERIES)
            inside = request < requests
            begin = tl.load(cu_seqlens_q + request).to(tl.int32)
            end = tl.load(cu_seqlens_q + request + 1, mask=inside, other=0).to(tl.int32)
            end = tl.where(inside, end, tokens)
            length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
        first = block - begin  # of the request's queries
    else:
        # The last queries see the most keys: their programs start first.
        block = tl.num_programs(0) - 1 - block
        request = _find_request(cu_seqlens_q, requests, block, QUERIES)
        inside = request < requests
        begin = tl.load(cu_seqlens_q + request).to(tl.int32)
        end = tl.load(cu_seqlens_q + request + 1, mask=inside, other=0).to(tl.int32)
        end = tl.where(inside, end, tokens)
        length = tl.load(seq_lens + request, mask=inside, other=0).to(tl.int32)
        first = (block - (begin // QUERIES + request)) * QUERIES
        if begin + first >= end:
            return

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    live = (row < QUERIES * GROUP) & (begin + query < end)
    token = (begin + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    before = length - (end - begin)  # tokens ahead of the request's queries
    at = before + query  # the queries' positions
    dim = tl.arange(0, BLOCK_DIM).to(tl.int64)
    dim_v = tl.arange(0, BLOCK_DIM_V)

    # Keys that any query of the block sees, in whole tiles, this split's share of them.
    fits = length <= columns * PAGE
    last = tl.minimum(before + tl.minimum(first + QUERIES, end - begin), length)
    last = tl.where(fits, tl.maximum(last, 0), 0)
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(0, before + first - window + 1)
    origin = lowest
    if PAGE % KEYS == 0:
        origin = lowest // KEYS * KEYS
    tiles = (tl.maximum(last - origin, 0) + KEYS - 1) // KEYS
    share = (tiles + SPLITS - 1) // SPLITS
    start = split * share
    stop = tl.minimum(start + share, tiles)
    if SPLITS > 1:
        tops = partial + tokens.to(tl.int64) * (SPLITS * HEADS * DIM_V)
        place = (split.to(tl.int64) * tokens + token) * HEADS + head
        if start >= stop:
            tl.device_assert(fits, "swa::paged_attention: seq_lens exceed page_table")
            tl.store(tops + place, float("-inf"), mask=live)
            return

    queries = tl.load(
        q + (token * Q_TOKEN + head * Q_HEAD)[:, None] + dim[None, :] * Q_DIM,
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    if WIDE:
        queries = queries.to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    weighted = tl.full((ROWS, BLOCK_DIM_V), 0.0, tl.float32)
    wrong = tl.full((KEYS,), 0, tl.int32)
    k_head = k_cache + kv_head * K_HEAD
    v_head = v_cache + kv_head * V_HEAD
    table = page_table + request.to(tl.int64) * table_row

    # Tiles that all queries see whole come between tiles that need a mask. A single query has one
    # loop for all: its tiles are few, and loads of one loop do not run ahead into the next.
    full, full_end = stop, stop
    if QUERIES > 1:
        full = 0
        if WINDOW:
            full = (tl.maximum(last - window - origin, 0) + KEYS - 1) // KEYS
        full_end = tl.maximum(before + first + 1 - origin, 0) // KEYS
        full = tl.minimum(tl.maximum(full, start), stop)
        full_end = tl.minimum(tl.maximum(full_end, full), stop)
        for i in range(full, full_end):
            top, total, weighted, wrong = _take_in(
                top,
                total,
                weighted,
                wrong,
                origin + i * KEYS,
                lowest,
                last,
                queries,
                at,
                k_head,
                v_head,
                table,
                rows,
                multiplier,
                cap,
                window,
                K_ROW,
                K_DIM,
                V_ROW,
                V_DIM,
                TABLE_COLUMN,
                PAGE,
                KEYS,
                DIM,
                DIM_V,
                BLOCK_DIM,
                BLOCK_DIM_V,
                WINDOW,
                SOFTCAP,
                PRECISION,
                False,
            )
    # The rest: start ... full and full_end ... stop as one range.
    gap = full_end - full
    for j in range(start, stop - gap):
        i = tl.where(j < full, j, j + gap)
        top, total, weighted, wrong = _take_in(
            top,
            total,
            weighted,
            wrong,
            origin + i * KEYS,
            lowest,
            last,
            queries,
            at,
            k_head,
            v_head,
            table,
            rows,
            multiplier,
            cap,
            window,
            K_ROW,
            K_DIM,
            V_ROW,
            V_DIM,
            TABLE_COLUMN,
            PAGE,
            KEYS,
            DIM,
            DIM_V,
            BLOCK_DIM,
            BLOCK_DIM_V,
            WINDOW,
            SOFTCAP,
            PRECISION,
            True,
        )
    tl.device_assert(fits, "swa::paged_attention: seq_lens exceed page_table")
    tl.device_assert(wrong == 0, "swa::paged_attention: a key that a query sees has no slot")

    written = live[:, None] & (dim_v < DIM_V)[None, :]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32)
            sink = tl.where(length > 0, sink * 1.4426950408889634, float("-inf"))
            new_top = tl.maximum(top, sink)
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - reference)
            weighted = weighted * shrink[:, None]
            total = total * shrink + tl.exp2(sink - reference)
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + ((token * HEADS + head) * DIM_V)[:, None] + dim_v[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=written)
    else:
        totals = tops + tokens.to(tl.int64) * (SPLITS * HEADS)
        tl.store(partial + (place * DIM_V)[:, None] + dim_v[None, :], weighted, mask=written)
        tl.store(tops + place, top, mask=live)
        tl.store(totals + place, total, mask=live)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["sinks"])
def merge(
    out,
    partial,
    sinks,
    tokens,
    HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """`out` of what the splits left in `partial`. Grid: (tokens, HEADS)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_DIM_V)
    tops_at = partial + tokens.to(tl.int64) * (SPLITS * HEADS * DIM_V)
    totals_at = tops_at + tokens.to(tl.int64) * (SPLITS * HEADS)
    place = (split.to(tl.int64) * tokens + token) * HEADS + head
    tops = tl.load(tops_at + place, mask=split < SPLITS, other=float("-inf"))
    worked = tops > float("-inf")  # the others have written nothing else
    totals = tl.load(totals_at + place, mask=worked, other=0.0)
    parts = tl.load(
        partial + (place * DIM_V)[:, None] + dim[None, :],
        mask=worked[:, None] & (dim < DIM_V)[None, :],
        other=0.0,
    )
    top = tl.reduce(tops, 0, _larger)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        sink = tl.where(top == float("-inf"), float("-inf"), sink)  # a row that sees no key
        top = tl.maximum(top, sink)
    reference = tl.where(top == float("-inf"), 0.0, top)
    factors = tl.exp2(tops - reference)
    total = tl.reduce(totals * factors, 0, _plus)
    if SINKS:
        total += tl.exp2(sink - reference)
    result = tl.reduce(parts * factors[:, None], 0, _plus) / tl.where(total == 0.0, 1.0, total)
    target = out + (token * HEADS + head) * DIM_V + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < DIM_V)
