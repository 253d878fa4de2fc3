"""What `paged_attention` demands of its inputs: their metadata, and on the CPU their contents."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .checks import (
    INDEX_DTYPES,
    Size,
    argument,
    require,
    require_device,
    require_dtype,
    require_floating,
    require_positive,
    require_rank,
    shape_name,
    size_name,
)

_OP = "paged_attention"


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page_size: Size,
    window: Size | None,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Raise `TypeError` or `ValueError` where the metadata is wrong, with or without data."""
    floating = {"q": (q, "[N, H_q, D]"), "k_cache": (k_cache, "[rows, H_kv, D]")}
    floating["v_cache"] = (v_cache, "[rows, H_kv, D_v]")
    for name, (tensor, form) in floating.items():
        require_floating(argument(_OP, name), tensor)
        require_rank(argument(_OP, name), tensor, 3, form)
        require_device(argument(_OP, name), tensor, "q", q)
    index = {"page_table": (page_table, 2, "[B, P]"), "seq_lens": (seq_lens, 1, "[B]")}
    index["cu_seqlens_q"] = (cu_seqlens_q, 1, "[B + 1]")
    for name, (tensor, rank, form) in index.items():
        require_dtype(argument(_OP, name), tensor, *INDEX_DTYPES)
        require_rank(argument(_OP, name), tensor, rank, form)
        require_device(argument(_OP, name), tensor, "q", q)

    require(
        k_cache.shape[2] == q.shape[2],
        lambda: (
            f"{argument(_OP, 'k_cache')} must have the head dimension of 'q': "
            f"got {shape_name(k_cache)} for {shape_name(q)}"
        ),
    )
    require(
        v_cache.shape[1] == k_cache.shape[1],
        lambda: (
            f"{argument(_OP, 'v_cache')} must have the heads of 'k_cache': "
            f"got {shape_name(v_cache)} for {shape_name(k_cache)}"
        ),
    )
    require(
        q.shape[1] % k_cache.shape[1] == 0,
        lambda: (
            f"{argument(_OP, 'q')} must have a multiple of the heads of 'k_cache': "
            f"got {shape_name(q)} for {shape_name(k_cache)}"
        ),
    )
    require(
        seq_lens.shape[0] == page_table.shape[0],
        lambda: (
            f"{argument(_OP, 'seq_lens')} must have one length per row of 'page_table': "
            f"got {size_name(seq_lens.shape[0])} for {size_name(page_table.shape[0])} rows"
        ),
    )
    require(
        cu_seqlens_q.shape[0] == page_table.shape[0] + 1,
        lambda: (
            f"{argument(_OP, 'cu_seqlens_q')} must have one entry more than 'page_table' has "
            f"rows: got {size_name(cu_seqlens_q.shape[0])} for "
            f"{size_name(page_table.shape[0])} rows"
        ),
    )
    require_positive(argument(_OP, "page_size"), page_size)
    if window is not None:
        require_positive(argument(_OP, "window"), window)
    if not softcap >= 0:
        raise ValueError(f"{argument(_OP, 'softcap')} must be 0 or greater, got {softcap}")
    if sinks is not None:
        where = argument(_OP, "sinks")
        require_floating(where, sinks)
        require_rank(where, sinks, 1, "[H_q]")
        require_device(where, sinks, "q", q)
        require(
            sinks.shape[0] == q.shape[1],
            lambda: (
                f"{where} must have one logit per head of 'q': "
                f"got {shape_name(sinks)} for {shape_name(q)}"
            ),
        )


def looks_right(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page_size: int,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> bool:
    """Whether `check_inputs` would pass tensors with data, in a few microseconds.

    An eager call runs once per layer between captured pieces, where its host time is the step's.
    """
    q_shape, k_shape, v_shape = q.shape, k_cache.shape, v_cache.shape
    table_shape, device = page_table.shape, q.device
    return (
        len(q_shape) == len(k_shape) == len(v_shape) == 3
        and len(table_shape) == 2
        and k_shape[1] > 0
        and k_shape[2] == q_shape[2]
        and v_shape[1] == k_shape[1]
        and q_shape[1] % k_shape[1] == 0
        and seq_lens.shape == table_shape[:1]
        and cu_seqlens_q.shape == (table_shape[0] + 1,)
        and page_table.dtype in INDEX_DTYPES
        and seq_lens.dtype in INDEX_DTYPES
        and cu_seqlens_q.dtype in INDEX_DTYPES
        and q.dtype.is_floating_point
        and k_cache.dtype.is_floating_point
        and v_cache.dtype.is_floating_point
        and k_cache.device == device
        and v_cache.device == device
        and page_table.device == device
        and seq_lens.device == device
        and cu_seqlens_q.device == device
        and page_size >= 1
        and (window is None or window >= 1)
        and softcap >= 0
        and (
            sinks is None
            or (
                sinks.dtype.is_floating_point
                and sinks.shape == q_shape[1:2]
                and sinks.device == device
            )
        )
    )


def check_contents(
    queries: int,
    rows: int,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page_size: int,
    window: int | None,
) -> None:
    """Raise `ValueError` where lengths contradict each other or a key lies outside the caches.

    For tensors on the CPU. All of `page_table` that no query sees is free.

    Args:
        queries: N, the rows of q.
        rows: rows that both caches have.
    """
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    spans = list(pairwise(starts))
    if starts[0] != 0 or any(end < start for start, end in spans) or starts[-1] > queries:
        raise ValueError(
            f"{argument(_OP, 'cu_seqlens_q')} must rise from 0 to at most {queries}, the rows of "
            f"'q'; got {starts}"
        )
    capacity = page_table.shape[1] * page_size
    low, high = capacity, 0  # no query sees a token outside of these
    for request, (start, end) in enumerate(spans):
        length, count = lens[request], end - start
        if length < 0 or (length and count and not count <= length <= capacity):
            raise ValueError(
                f"{argument(_OP, 'seq_lens')} holds {length} for request {request}, which "
                f"has {count} new tokens and a page table for {capacity}"
            )
        if length and count:
            high = max(high, length)
            low = min(low, 0 if window is None else max(0, length - count - window + 1))
    if not high:
        return
    # All entries between, those included that no query sees: where they are right, so is the rest.
    smallest, largest = page_table[:, low // page_size : -(-high // page_size)].aminmax()
    if int(smallest) < 0 or int(largest) >= rows // page_size:
        _check_pages(rows, page_table, seq_lens, cu_seqlens_q, page_size, window)


def _check_pages(
    rows: int,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page_size: int,
    window: int | None,
) -> None:
    """The entries that a query sees, exactly."""
    counts, lens = cu_seqlens_q.long().diff(), seq_lens.long()
    end = torch.where(counts > 0, lens, 0)[:, None]
    start = torch.zeros_like(end)
    if window is not None:
        start = (end - counts[:, None] - window + 1).clamp_min(0)
    first_token = page_size * torch.arange(-(-int(end.max()) // page_size), device=end.device)
    seen = (first_token < end) & (first_token + page_size > start)
    last_offset = (end - first_token).clamp_max(page_size) - 1
    pages = page_table[:, : first_token.shape[0]].long()
    # Divided, not multiplied: an int64 entry times the page size may wrap around.
    outside = seen & ((pages < 0) | (pages > (rows - 1 - last_offset) // page_size))
    if bool(outside.any()):
        request, page = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{argument(_OP, 'page_table')} holds {int(pages[request, page])} for page {page} of "
            f"request {request}, which a query sees; with {page_size} tokens per page the caches "
            f"have {rows} rows"
        )
