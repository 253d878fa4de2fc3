"""The translations as one Triton kernel, for eager code on a GPU.

The rules stand in `translate`. Imported only where a GPU needs it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


# `debug` turns device assertions on.
@triton.jit(debug=True)
def _translate(
    mapping,
    mapping_stride,
    mapping_len,
    ids_in,
    out,
    count,
    page_size,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    ids = tl.load(ids_in + at, mask=live, other=-1).to(tl.int64)
    if RULE == "translate_loc":
        index = ids
    elif RULE == "translate_page_table":
        index = tl.minimum(ids, mapping_len) * page_size  # of any int64 id it could wrap around
    else:
        index = ids // page_size
    known = (ids >= 0) & (index < mapping_len)
    if RULE == "translate_paged_loc":
        tl.device_assert(ids >= -1, "swa: an id to translate is below -1")
    else:
        tl.device_assert(known | (ids == -1), "swa: an id to translate is out of range")
    entry = tl.load(mapping + index * mapping_stride, mask=known, other=-1)
    if RULE == "translate_page_table":
        # Triton divides towards zero, which would make a none (-1) the sink (0).
        entry = tl.where(entry < 0, -((page_size - 1 - entry) // page_size), entry // page_size)
    elif RULE == "translate_paged_loc":
        entry = tl.where(known & (entry >= 0), entry * page_size + ids % page_size, 0)
    tl.store(out + at, entry, mask=live)


def translate(rule: str, mapping: Tensor, loc: Tensor, page_size: int = 1) -> Tensor:
    """Translate `loc` by the rule of the operator `rule`, in one launch.

    Args:
        rule: "translate_loc", "translate_page_table" or "translate_paged_loc".
        mapping, loc, page_size: checked already, but for the range of the ids: an id out of range
            stops the device.

    Returns:
        int64, contiguous, of the shape of `loc`.
    """
    ids = loc.contiguous()
    out = torch.empty(loc.shape, dtype=torch.int64, device=loc.device)
    count = out.numel()
    if count:
        _translate[(triton.cdiv(count, _BLOCK),)](
            mapping,
            mapping.stride(0),
            mapping.shape[0],
            ids,
            out,
            count,
            page_size,
            RULE=rule,
            BLOCK=_BLOCK,
        )
    return out
