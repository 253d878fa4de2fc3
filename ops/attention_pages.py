"""Page ids out of a page table into one list, as FlashInfer reads them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["table_row", "room"])
def _copy(
    page_table,
    table_row,
    first_page,
    offsets,
    pages,
    room,
    TABLE_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(first_page + request)
    begin = tl.load(offsets + request)
    count = tl.load(offsets + request + 1) - begin
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < count) & (begin + at < room)
    entry = page_table + request * table_row + (first + at).to(tl.int64) * TABLE_COLUMN
    page = tl.load(entry, mask=inside & (first >= 0), other=0)
    tl.store(pages + begin + at, page.to(tl.int32), mask=inside)


def copy_pages(page_table: Tensor, first_page: Tensor, offsets: Tensor, pages: Tensor) -> None:
    """Write each request's pages to its part of `pages`.

    Args:
        page_table: int32 or int64 `[B, P]`.
        first_page: int32 `[B]`, the column where a request's pages begin; -1 gives it zeros.
        offsets: int32 `[B + 1]`, where each request's part of `pages` begins.
        pages: int32, written as far as the offsets say.
    """
    requests, columns = page_table.shape
    # A padding request may have more pages, all of them 0, than the table has columns.
    widest = max(columns, 1) if requests else 0
    grid = (requests, triton.cdiv(max(widest, min(pages.shape[0], _BLOCK)), _BLOCK))
    if requests:
        _copy[grid](
            page_table,
            page_table.stride(0),
            first_page,
            offsets,
            pages,
            pages.shape[0],
            page_table.stride(1),
            _BLOCK,
        )
