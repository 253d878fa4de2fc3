"""Translation of full-pool ids to SWA-pool ids: element-wise gathers through a mapping.

Each operator takes ids of any shape and strides and gives a fresh, contiguous int64 tensor of the
same shape. The `reference_*` functions are the rules; kernels and passes have to agree with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import (
    INDEX_DTYPES,
    UNBOUNDED,
    Size,
    argument,
    checked_ids,
    require_device,
    require_dtype,
    require_positive,
    require_rank,
)
from .library import define, has_triton
from .marks import mark_translation


def translate_loc(mapping: Tensor, loc: Tensor) -> Tensor:
    """Translate token ids: `mapping[loc]`, and -1 ("none") stays -1.

    Args:
        mapping: int64 `[full_tokens + page_size + 1]`; 0 where a token has no SWA slot, -1 last.
        loc: int32 or int64 token ids of any shape, each in `[-1, len(mapping))`.

    Returns:
        int64 of the shape of `loc`, fresh and contiguous.

    Raises:
        TypeError, ValueError: dtype, rank or device is wrong, or (on the CPU; a GPU asserts on the
            device) an id is out of range.
    """
    return torch.ops.swa.translate_loc.default(mapping, loc)


def translate_page_table(mapping: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Translate page ids through a token mapping: `floor(mapping[p * page_size] / page_size)`.

    Args:
        mapping: int64 `[full_tokens + page_size + 1]`, as for `translate_loc`: tokens, not pages.
        page_table: int32 or int64 page ids of any shape, -1 ("none") or with
            `p * page_size < len(mapping)`.
        page_size: tokens per page, at least 1.

    Returns:
        int64 of the shape of `page_table`, fresh and contiguous; -1 stays -1.

    Raises:
        TypeError, ValueError: as `translate_loc`, or `page_size` is below 1.
    """
    return torch.ops.swa.translate_page_table.default(mapping, page_table, page_size)


def translate_paged_loc(page_mapping: Tensor, loc: Tensor, page_size: int) -> Tensor:
    """Translate token ids through a page mapping (a unified pool).

    Token `t` goes to `page_mapping[t // page_size] * page_size + t % page_size`. Whatever has no
    place goes to the sink, 0: -1, pages past the end, and tombstones (negative entries).

    Args:
        page_mapping: int64 `[pages]`: page id -> page id.
        loc: int32 or int64 token ids of any shape, each at least -1.
        page_size: tokens per page, at least 1.

    Returns:
        int64 of the shape of `loc`, fresh and contiguous.

    Raises:
        TypeError, ValueError: as `translate_loc`, or `page_size` is below 1.
    """
    return torch.ops.swa.translate_paged_loc.default(page_mapping, loc, page_size)


def reference_loc(mapping: Tensor, ids: Tensor) -> Tensor:
    """The rule of `translate_loc`, for ids that are in range."""
    return torch.where(ids < 0, -1, _gather(mapping, ids.clamp_min(0)))


def reference_page_table(mapping: Tensor, ids: Tensor, page_size: int) -> Tensor:
    """The rule of `translate_page_table`, for ids that are in range."""
    token = _gather(mapping, ids.clamp_min(0) * page_size)
    return torch.where(ids < 0, -1, token.div(page_size, rounding_mode="floor"))


def reference_paged_loc(page_mapping: Tensor, ids: Tensor, page_size: int) -> Tensor:
    """The rule of `translate_paged_loc`, for ids of at least -1."""
    page = ids.clamp_min(0).div(page_size, rounding_mode="floor")
    known = (ids >= 0) & (page < page_mapping.shape[0])
    entry = _gather(page_mapping, torch.where(known, page, 0))
    return torch.where(known & (entry >= 0), entry * page_size + ids % page_size, 0)


def _gather(mapping: Tensor, index: Tensor) -> Tensor:
    """`mapping[index]`; an empty mapping, which no id but "none" can be in, gives zeros."""
    return mapping[index] if mapping.shape[0] else torch.zeros_like(index)


def _check(op: str, mapping_name: str, mapping: Tensor, loc_name: str, loc: Tensor) -> None:
    where = argument(op, mapping_name)
    require_dtype(where, mapping, torch.int64)
    require_rank(where, mapping, 1, "[ids]")
    where = argument(op, loc_name)
    require_dtype(where, loc, *INDEX_DTYPES)
    require_device(where, loc, mapping_name, mapping)


def _define(
    schema: str,
    reference: Callable[..., Tensor],
    upper: Callable[..., int],
) -> None:
    """Define one translation operator from its schema, its rule, and the ids that it takes.

    Args:
        schema: `name(Tensor <mapping>, Tensor <ids>[, SymInt page_size]) -> Tensor`.
        reference: the rule.
        upper: (mapping, *page_size) -> the first id that is out of range.
    """
    parsed = torch._C.parse_schema(schema)
    name = parsed.name
    mapping_name, loc_name = (arg.name for arg in parsed.arguments[:2])
    where = argument(name, loc_name)

    def check(mapping: Tensor, loc: Tensor, *page_size: Size) -> None:
        _check(name, mapping_name, mapping, loc_name, loc)
        for size in page_size:
            require_positive(argument(name, "page_size"), size)

    def fake(mapping: Tensor, loc: Tensor, *page_size: Size) -> Tensor:
        check(mapping, loc, *page_size)
        return torch.empty(loc.shape, dtype=torch.int64, device=loc.device)

    def kernel(mapping: Tensor, loc: Tensor, *page_size: int) -> Tensor:
        check(mapping, loc, *page_size)
        ids = checked_ids(loc, -1, upper(mapping, *page_size), where)
        return reference(mapping, ids.long(), *page_size)

    def cuda(mapping: Tensor, loc: Tensor, *page_size: int) -> Tensor:
        if not has_triton():
            return kernel(mapping, loc, *page_size)
        from .translate_triton import translate

        check(mapping, loc, *page_size)
        with torch.cuda.device(loc.device):
            return translate(name, mapping, loc, *page_size)

    define(schema, fake=fake, every=kernel, CUDA=cuda)
    mark_translation(f"swa::{name}", mapping=0, loc=1)


_define(
    "translate_loc(Tensor mapping, Tensor loc) -> Tensor",
    reference_loc,
    upper=lambda mapping: mapping.shape[0],
)
_define(
    "translate_page_table(Tensor mapping, Tensor page_table, SymInt page_size) -> Tensor",
    reference_page_table,
    upper=lambda mapping, page_size: -(-mapping.shape[0] // page_size),
)
_define(
    "translate_paged_loc(Tensor page_mapping, Tensor loc, SymInt page_size) -> Tensor",
    reference_paged_loc,
    upper=lambda page_mapping, page_size: UNBOUNDED,
)
