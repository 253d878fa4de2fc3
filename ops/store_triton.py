"""The stores as one Triton kernel, for eager code on a GPU.

The rules stand in `store`. Imported only where a GPU needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 1024


@triton.jit
def _write_row(
    cache,
    cache_row,
    cache_head,
    cache_dim,
    values,
    values_row,
    values_head,
    values_dim,
    scale,
    slot,
    token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, HEADS * DIM, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < HEADS * DIM
        head = (at // DIM).to(tl.int64)
        dim = (at % DIM).to(tl.int64)
        source = values + token * values_row + head * values_head + dim * values_dim
        value = tl.load(source, mask=live, other=0)
        if LIMIT is not None:
            value = value.to(tl.float32)
            if SCALED:
                # Rounded to nearest, like torch's division; Triton's `/` is less exact.
                value = tl.div_rn(value, tl.load(scale).broadcast_to((BLOCK,)))
            value = tl.maximum(value, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        target = cache + slot * cache_row + head * cache_head + dim * cache_dim
        tl.store(target, value.to(cache.dtype.element_ty), mask=live)


# `debug` turns device assertions on.
@triton.jit(debug=True)
def _store(
    loc,
    loc_stride,
    rows,
    cache_a,
    cache_a_row,
    cache_a_head,
    cache_a_dim,
    values_a,
    values_a_row,
    values_a_head,
    values_a_dim,
    scale_a,
    cache_b,
    cache_b_row,
    cache_b_head,
    cache_b_dim,
    values_b,
    values_b_row,
    values_b_head,
    values_b_dim,
    scale_b,
    HEADS_A: tl.constexpr,
    DIM_A: tl.constexpr,
    SCALED_A: tl.constexpr,
    LIMIT_A: tl.constexpr,
    HEADS_B: tl.constexpr,
    DIM_B: tl.constexpr,
    SCALED_B: tl.constexpr,
    LIMIT_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits from here on: slot times row stride passes 2^31 in real pools.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + token * loc_stride).to(tl.int64)
    inside = (slot >= -1) & (slot < rows)
    tl.device_assert(inside, "swa: an id to store at is out of range")
    slot = tl.maximum(slot, 0)
    if inside & (tl.program_id(1) == 0):
        _write_row(
            cache_a,
            cache_a_row,
            cache_a_head,
            cache_a_dim,
            values_a,
            values_a_row,
            values_a_head,
            values_a_dim,
            scale_a,
            slot,
            token,
            HEADS_A,
            DIM_A,
            SCALED_A,
            LIMIT_A,
            BLOCK,
        )
    elif inside:
        _write_row(
            cache_b,
            cache_b_row,
            cache_b_head,
            cache_b_dim,
            values_b,
            values_b_row,
            values_b_head,
            values_b_dim,
            scale_b,
            slot,
            token,
            HEADS_B,
            DIM_B,
            SCALED_B,
            LIMIT_B,
            BLOCK,
        )


def supports(cache: Tensor) -> bool:
    """Whether the kernel can write `cache`: at most 3-D, a dtype that the GPU converts to."""
    dtype = cache.dtype
    if cache.dim() > 3:
        return False
    if not (dtype.is_floating_point and dtype.itemsize == 1):
        return True
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or torch.version.hip is not None:
        return False
    return cache.device.type != "cuda" or torch.cuda.get_device_capability(cache.device) >= (8, 9)


def store(rows: Sequence[tuple[Tensor, Tensor, Tensor | None]], loc: Tensor) -> None:
    """Write one or two caches in one launch, a program per token and cache.

    Args:
        rows: (cache, values, scale) of each, checked already; `supports(cache)` holds.
        loc: `[N]`, any stride; an id out of range stops the device and is written nowhere.
    """
    operands: list[object] = []
    constants: dict[str, object] = {}
    widest = 1
    for name, (cache, values, scale) in zip("AB", (rows[0], rows[-1]), strict=True):
        cache, values = _as_3d(cache), _as_3d(values)
        operands += [cache, *cache.stride(), values, *values.stride()]
        operands.append(values if scale is None else scale)
        _, heads, dim = cache.shape
        float8 = cache.dtype.is_floating_point and cache.dtype.itemsize == 1
        constants[f"HEADS_{name}"], constants[f"DIM_{name}"] = heads, dim
        constants[f"SCALED_{name}"] = scale is not None
        constants[f"LIMIT_{name}"] = torch.finfo(cache.dtype).max if float8 else None
        widest = max(widest, heads * dim)
    if loc.shape[0]:
        block = min(_MAX_BLOCK, triton.next_power_of_2(widest))
        count = min(cache.shape[0] for cache, _, _ in rows)
        grid = (loc.shape[0], len(rows))
        _store[grid](loc, loc.stride(0), count, *operands, **constants, BLOCK=block)


def _as_3d(tensor: Tensor) -> Tensor:
    """`[rows, ...]` as `[rows, heads, dim]`, the same memory."""
    return tensor if tensor.dim() == 3 else _as_3d(tensor.unsqueeze(1))
