"""The sizes with which the Triton attention kernels are launched: tiles, warps, splits.

All of it follows from sizes and dtypes alone: a length that the device holds would take a
synchronization. Decode is bound by memory, so its tiles are as large as fits a few times into the
shared memory; extend by products, so its tiles are as high as the queries allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

_MAX_SPLITS = 64

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
    least = max(16, power_of_2(group))
    width = sum(max(16, power_of_2(dim)) for dim in dims) * itemsize
    if tokens <= requests:
        rows, blocks = least, tokens
        keys = min(64, max(16, power_of_2(_TILE_BYTES // width + 1) // 2))
        if window is not None:
            keys = min(keys, max(16, power_of_2(window)))
        warps, depth = 4, 2
        # Of a few small tiles, half the size at half the warps: more programs are at work at a
        # time (H200, window 128: 8.3 us for 9.1).
        few = window is not None and window <= 128 and width <= 256
        if few and blocks * kv_heads >= device.multiprocessors:
            keys, warps = min(keys, 32), 2
    else:
        wanted = power_of_2(group * -(-tokens // requests))
        # Products of float32 take no tensor cores, and their operands many registers.
        rows = max(least, min(128 if itemsize <= 2 else 32, wanted))
        blocks = tokens // max(1, rows // group) + requests + 1
        keys = min(64 if itemsize <= 2 else 32, max(16, power_of_2(_TILE_BYTES // width + 1) // 2))
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


def power_of_2(number: int) -> int:
    """The next power of 2 from `number` on."""
    return 1 << max(0, number - 1).bit_length()
