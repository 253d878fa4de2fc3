"""How the Triton attention kernels are launched: tile sizes, warps, splits.

All of it follows from sizes and dtypes alone: a length that the device holds would take a
synchronization. Decode is bound by memory, so its tiles are as large as fits a few times into the
shared memory; extend by products, so its tiles are as high as the queries allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import attention_triton
from .attention_reference import Keys
from .checks import dtype_name, is_float8
from .triton_launch import FixedKernel

_LOG2_E = math.log2(math.e)
_MAX_SPLITS = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# Bytes of one tile of K and V in decode: two of them, of three programs at a time, fit an SM.
_TILE_BYTES = 2**15


@dataclass(frozen=True)
class Device:
    """What of a device the sizes depend on.

    Attributes:
        multiprocessors: how many it has.
        shared_memory: bytes that one program may use.
    """

    multiprocessors: int
    shared_memory: int


@dataclass(frozen=True)
class Tuning:
    """The sizes of a launch.

    Attributes:
        rows: rows of a block: queries times query heads per KV head, a power of 2 from 16 on.
        keys: keys per tile, a power of 2 from 16 on.
        warps: `num_warps` of Triton.
        depth: tiles whose keys are on their way at a time. Their page ids are loaded as far ahead
            again, so it takes `num_stages` of 2 * depth + 1.
        splits: into how many parts the keys of a request are split.
    """

    rows: int
    keys: int
    warps: int
    depth: int
    splits: int


@lru_cache(maxsize=4096)
def tuning_for(
    tokens: int,
    requests: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    itemsize: int,
    page_size: int,
    capacity: int,
    window: int | None,
    device: Device,
) -> Tuning:
    """The sizes for a call.

    Args:
        dims: D and D_v.
        itemsize: bytes of an element of the caches or of q, the larger.
        capacity: tokens that a row of the page table has room for.
    """
    least = max(16, _power_of_2(group))
    width = sum(max(16, _power_of_2(dim)) for dim in dims) * itemsize
    if tokens <= requests:
        rows, blocks = least, tokens
        keys = min(64, max(16, _power_of_2(_TILE_BYTES // width + 1) // 2))
        if window is not None:
            keys = min(keys, max(16, _power_of_2(window)))
        warps, depth = 4, 2
    else:
        wanted = _power_of_2(group * -(-tokens // requests))
        # Products of float32 take no tensor cores, and their operands many registers.
        rows = max(least, min(128 if itemsize <= 2 else 32, wanted))
        blocks = tokens // max(1, rows // group) + requests + 1
        keys = min(64 if itemsize <= 2 else 32, max(16, _power_of_2(_TILE_BYTES // width + 1) // 2))
        warps, depth = (8, 1) if rows >= 128 and max(dims) > 64 else (4, 2)
    held = rows * width  # queries and weights, at most
    while depth > 1 and held + depth * keys * width > device.shared_memory:
        depth -= 1
    while keys > 16 and held + depth * keys * width > device.shared_memory:
        keys //= 2
    reach = capacity
    if window is not None:
        reach = min(reach, window + (0 if tokens <= requests else rows // group))
    # A split with fewer tiles gains less than the second launch costs.
    most = min(_MAX_SPLITS, reach // (4 * keys))
    splits = _splits(blocks * kv_heads, most, 2 * device.multiprocessors)
    return Tuning(rows, keys, warps, depth, splits)


def _splits(programs: int, most: int, slots: int) -> int:
    """The fewest splits that keep `slots` programs at a time about as busy as any number does."""
    if programs >= 0.8 * slots:
        return 1
    busy = {}
    for splits in range(1, max(1, most) + 1):
        waves = programs * splits / slots
        busy[splits] = waves / math.ceil(waves) if waves else 1.0
    best = max(busy.values())
    return next(splits for splits, share in busy.items() if share >= 0.85 * best)


@lru_cache
def device_of(device: torch.device) -> Device:
    """What the sizes depend on; of a device that has no such figures, a small one's."""
    if device.type != "cuda":
        return Device(1, 99 * 1024)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 99 * 1024)
    return Device(found.multi_processor_count, shared)


def refusal(q: Tensor, keys: Keys) -> str | None:
    """Why the kernels cannot compute this call; None where they can."""
    caches = keys.k_cache, keys.v_cache
    dims = q.shape[2], caches[1].shape[2]
    return _refusal(q.dtype, caches[0].dtype, caches[1].dtype, max(dims), q.device)


@lru_cache
def _refusal(
    q: torch.dtype, k_cache: torch.dtype, v_cache: torch.dtype, dim: int, device: torch.device
) -> str | None:
    for name, dtype in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if is_float8(dtype) and name != "q":
            if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or torch.version.hip:
                return f"{name} is {dtype_name(dtype)}; of float8 it takes e4m3fn and e5m2"
            if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
                return f"{name} is {dtype_name(dtype)}, which needs compute capability 8.9"
        elif dtype not in _FLOATS:
            return f"{name} is {dtype_name(dtype)}; it takes float16, bfloat16 and float32"
    return f"head dimension {dim}; it takes up to 512" if dim > 512 else None


def attention(
    q: Tensor,
    keys: Keys,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
    tuning: Tuning | None = None,
) -> None:
    """Attention of `q` `[N, H_q, D]` over `keys` into `out`, `[N, H_q, D_v]`, contiguous.

    Scores and sums are float32; products are of q's dtype, or of float32 where the caches have a
    wider one or another of 16 bits. Sizes and dtypes have been checked, and `refusal` is None. One
    launch, or two where the keys are split.

    Args:
        tuning: the sizes; None chooses them by `tuning_for`.
    """
    if not out.numel():
        return
    k_cache, v_cache, table, sinks = keys.k_cache, keys.v_cache, keys.page_table, keys.sinks
    if sinks is not None:
        sinks = sinks.contiguous()
    launch = _launch(
        (q.shape, k_cache.shape, v_cache.shape, table.shape),
        (q.stride(), k_cache.stride(), v_cache.stride(), table.stride()),
        (q.dtype, k_cache.dtype, v_cache.dtype),
        keys.page_size,
        keys.scale,
        keys.window,
        keys.softcap,
        sinks is not None,
        q.device,
        tuning,
    )
    lens, starts = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    partial = out
    if launch.partial:
        partial = torch.empty(launch.partial, dtype=torch.float32, device=q.device)
    launch.attend(launch.grid, out, partial, q, k_cache, v_cache, table, lens, starts, sinks)
    if launch.merge is not None:
        launch.merge((q.shape[0], q.shape[1], 1), out, partial, sinks)


@dataclass(frozen=True)
class _Launch:
    """What of a call follows from sizes and dtypes.

    Attributes:
        grid: of `attend`.
        partial: elements of the memory between the two kernels, 0 where there is one.
        merge: None where the keys are not split.
    """

    grid: tuple[int, int, int]
    partial: int
    attend: FixedKernel
    merge: FixedKernel | None


# Shapes, strides and dtypes are of q, k_cache, v_cache and the page table.
@lru_cache(maxsize=4096)
def _launch(
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float,
    has_sinks: bool,
    device: torch.device,
    tuning: Tuning | None,
) -> _Launch:
    (tokens, heads, dim), k_shape, (rows, kv_heads, dim_v), (requests, columns) = shapes
    rows = min(rows, k_shape[0])
    q_stride, k_stride, v_stride, table_stride = strides
    group = heads // kv_heads
    if tuning is None:
        tuning = tuning_for(
            tokens,
            requests,
            kv_heads,
            group,
            (dim, dim_v),
            max(dtype.itemsize for dtype in dtypes),
            page_size,
            columns * page_size,
            window,
            device_of(device),
        )
    splits = tuning.splits
    if tokens <= requests:
        queries, blocks = 1, tokens
    else:
        queries = tuning.rows // group
        blocks = tokens // queries + requests + 1
    multiplier, cap = scale * _LOG2_E, 0.0
    if softcap:
        multiplier, cap = 2.0 * multiplier / softcap, softcap * _LOG2_E
    block_dim_v = max(16, _power_of_2(dim_v))
    attend = FixedKernel(
        attention_triton.attend,
        (
            tokens,
            requests,
            columns,
            table_stride[0],
            rows,
            multiplier,
            cap,
            window or 0,
            *q_stride,
            *k_stride,
            *v_stride,
            table_stride[1],
            page_size,
            heads,
            group,
            queries,
            tuning.rows,
            tuning.keys,
            dim,
            dim_v,
            max(16, _power_of_2(dim)),
            block_dim_v,
            splits,
            window is not None,
            softcap != 0.0,
            has_sinks,
            any(_is_wide(dtypes[0], dtype) for dtype in dtypes[1:]),
            "ieee",
        ),
        num_warps=tuning.warps,
        num_stages=2 * tuning.depth + 1,
        sanitize_overflow=False,
    )
    if splits == 1:
        return _Launch((blocks, kv_heads, 1), 0, attend, None)
    merge = FixedKernel(
        attention_triton.merge,
        (
            tokens,
            heads,
            dim_v,
            block_dim_v,
            splits,
            _power_of_2(splits),
            has_sinks,
        ),
        num_warps=min(8, max(1, _power_of_2(splits) * block_dim_v // 1024)),
    )
    # Weighted sums, then the top score and the sum of weights of each row.
    partial = splits * tokens * heads * (dim_v + 2)
    return _Launch((blocks, kv_heads, splits), partial, attend, merge)


def _is_wide(q: torch.dtype, cache: torch.dtype) -> bool:
    return cache is not q and not is_float8(cache) and q is not torch.float32


def _power_of_2(number: int) -> int:
    """The next power of 2 from `number` on."""
    return 1 << max(0, number - 1).bit_length()
