"""What FlashInfer is told about a batch: lengths, and page ids copied out of the table."""

import numpy as np
import pytest
import torch

from swa_compile.ops.attention_flashinfer import lengths_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES = {
    "decode": ([1, 1, 1], [5, 1, 90]),
    "extend": ([3, 1, 20], [8, 66, 20]),
    "empty and padded": ([1, 0, 2, 0, 5], [64, 0, 0, 7, 9]),
}


def told(new, lens, page_size, window):
    """(pages of the table per request, tokens in them, queries), as a loop."""
    for count, length in zip(new, lens, strict=True):
        if not count:
            yield [], 0, 0
        elif not length:
            yield [None] * -(-count // page_size), count, count
        else:
            low = 0 if window is None else max(0, length - count - window + 1)
            pages = list(range(low // page_size, -(-length // page_size)))
            yield pages, length - low // page_size * page_size, count


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_that_queries_see_are_listed_and_no_others(kernels, batch, page_size, window, index):
    new, lens = batch
    want = list(told(new, lens, page_size, window))
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    got = lengths_of(torch.tensor(lens, dtype=torch.int32), starts, page_size, window)
    assert all(part.dtype is torch.int32 for part in got)
    assert got.queries.tolist() == starts.tolist()
    counts = [len(pages) for pages, _, _ in want]
    assert got.pages.tolist() == [0, *np.cumsum(counts)]
    for count, last, (_, tokens, queries) in zip(counts, got.last_page, want, strict=True):
        assert max(count - 1, 0) * page_size + int(last) == tokens
        assert tokens >= queries

    table = torch.randint(1, 10**6, (len(lens), 96), dtype=index)
    table[:, 90:] = -1
    pages = torch.full((sum(counts) + 3,), -7, dtype=torch.int32, device=DEVICE)
    device = (part.to(DEVICE) for part in (table, got.first_page, got.pages))
    kernels("attention_pages").copy_pages(*device, pages)
    listed = [
        0 if page is None else int(table[b, page])
        for b, (columns, _, _) in enumerate(want)
        for page in columns
    ]
    assert pages.tolist() == [*listed, -7, -7, -7]


def test_list_without_room_is_not_written_past_its_end(kernels):
    pages = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    table = torch.arange(1, 9).view(1, 8).to(DEVICE)
    first, offsets = (torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in ([0], [0, 8]))
    kernels("attention_pages").copy_pages(table, first, offsets, pages[:3])
    assert pages.tolist() == [1, 2, 3, 0, 0]
