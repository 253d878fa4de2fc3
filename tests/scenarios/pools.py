"""A pair of pools in which every live full id lies beyond the rows of the SWA pool.

So a translation that is missed, or done twice, cannot pass by luck: the store meets an id that
its cache does not have.
"""

from __future__ import annotations

import numpy as np
import torch


class Pools:
    """Sizes, the mapping, and the ids that may be used.

    Args:
        full, swa: live pages of each pool, the sink's page 0 not counted.
        page: tokens per page.
        seed: of the mapping. Pools that differ in it alone have the same live ids.
    """

    def __init__(self, full: int = 144, swa: int = 47, page: int = 1, seed: int = 0) -> None:
        self.page = page
        self.full_rows, self.rows = (full + 1) * page, (swa + 1) * page
        beyond = np.random.default_rng(1).permutation(np.arange(swa + 1, full + 1))
        self.live_pages, self.evicted_pages = beyond[:swa], beyond[swa:]
        self.swa_pages = np.random.default_rng(seed + 2).permutation(np.arange(1, swa + 1))

    def mapping(self) -> torch.Tensor:
        """int64 `[full_rows + 1]`: distinct SWA rows for live ids, 0 for evicted ones, -1 last."""
        pages = np.zeros(self.full_rows // self.page, np.int64)
        pages[self.live_pages] = self.swa_pages
        slots = pages[:, None] * self.page + np.arange(self.page)
        slots[pages == 0] = 0
        return torch.from_numpy(np.append(slots.ravel(), -1))

    def live(self, count: int, skip: int = 0) -> torch.Tensor:
        """int64 `[count]`: distinct full ids that have an SWA row, none of them below `rows`."""
        ids = (self.live_pages[:, None] * self.page + np.arange(self.page)).ravel()
        assert skip + count <= len(ids), "more live ids than the SWA pool has rows"
        return contiguous(ids[skip : skip + count])

    def pages(self, *shape: int, skip: int = 0) -> torch.Tensor:
        """int32 live full page ids, distinct."""
        count = int(np.prod(shape))
        ids = self.live_pages[skip : skip + count].reshape(shape)
        return torch.from_numpy(ids.astype(np.int32))

    def cache(self, seed: int, *row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An SWA layer's cache with recognizable rows; `row` is the shape of one."""
        return values(self.rows, *(row or (2, 4)), seed=1000 + seed).to(dtype)

    def full_cache(self, seed: int, *row: int) -> torch.Tensor:
        """A full layer's cache."""
        return values(self.full_rows, *(row or (2, 4)), seed=2000 + seed)

    def caches(self, layers: int, *row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of SWA layers."""
        return [(self.cache(2 * i, *row), self.cache(2 * i + 1, *row)) for i in range(layers)]


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    """Multiples of 1/8, so that sums and small products are exact in any order."""
    drawn = np.random.default_rng(seed).integers(-64, 64, shape)
    return contiguous((drawn / 8).astype(np.float32))


def contiguous(array: np.ndarray) -> torch.Tensor:
    """A copy. The strides of an empty array are 0 in NumPy, a layout of its own to Dynamo."""
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format)
