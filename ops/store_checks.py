"""What the stores demand of their inputs: everything that shows without data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import (
    INDEX_DTYPES,
    argument,
    dtype_name,
    is_float8,
    require,
    require_device,
    require_dtype,
    require_floating,
    require_rank,
    shape_name,
    size_name,
)


class Rows(NamedTuple):
    """One cache and what is to be written to it, with the names that messages use.

    Attributes:
        cache: `[rows, ...]`, any strides.
        values: `[N, ...]`, the new rows.
        scale: 0-d float32; `values` are divided by it. None for 1.
    """

    cache_name: str
    cache: Tensor
    values_name: str
    values: Tensor
    scale_name: str
    scale: Tensor | None


def check_inputs(op: str, rows: list[Rows], loc: Tensor) -> None:
    """Raise `TypeError` or `ValueError` where the metadata is wrong, with or without data."""
    first = rows[0]
    where_loc = argument(op, "loc")
    require_dtype(where_loc, loc, *INDEX_DTYPES)
    require_rank(where_loc, loc, 1, "[N]")
    require_device(where_loc, loc, first.cache_name, first.cache)
    for row in rows:
        _check_rows(op, row, first)
        require(
            row.values.shape[0] == loc.shape[0],
            lambda row=row: (  # type: ignore[misc]
                f"{where_loc} must have one id per row of '{row.values_name}': "
                f"got {size_name(loc.shape[0])} ids for {size_name(row.values.shape[0])} rows"
            ),
        )


def _check_rows(op: str, row: Rows, first: Rows) -> None:
    where_cache = argument(op, row.cache_name)
    where = argument(op, row.values_name)
    for name, tensor in ((where_cache, row.cache), (where, row.values)):
        if tensor.dim() == 0:
            raise ValueError(f"{name} must have rows, got a 0-d tensor")
        require_device(name, tensor, first.cache_name, first.cache)
    if row.values.dtype is not row.cache.dtype:
        # An integer cache may hold float8 bytes; to round numbers into it would destroy them.
        require_floating(where_cache, row.cache)
        require_floating(where, row.values)
    pairs = list(zip(row.values.shape[1:], row.cache.shape[1:], strict=False))
    same_rank = row.values.dim() == row.cache.dim()
    for same in [same_rank, *(a == b for a, b in pairs)]:
        require(
            same,
            lambda: (
                f"{where} must have rows like those of '{row.cache_name}': "
                f"got {shape_name(row.values)} for a cache {shape_name(row.cache)}"
            ),
        )
    if row.scale is not None:
        where = argument(op, row.scale_name)
        if not is_float8(row.cache.dtype):
            given = dtype_name(row.cache.dtype)
            raise ValueError(f"{where} needs a float8 cache, got '{row.cache_name}' of {given}")
        require_dtype(where, row.scale, torch.float32)
        require_rank(where, row.scale, 0, "(a scalar)")
        require_device(where, row.scale, first.cache_name, first.cache)
