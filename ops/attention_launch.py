"""How the Triton attention kernels are launched, and which calls they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import attention_triton
from .attention_reference import Keys
from .attention_tuning import Tuning, device_of, power_of_2, tuning_for
from .checks import dtype_name, is_float8
from .triton_launch import FixedKernel

_LOG2_E = math.log2(math.e)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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
    sinks = keys.sinks
    if sinks is not None:
        sinks = sinks.contiguous()
    launch = _launch_for(q, keys, tuning)
    lens, starts = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    partial = _between(launch, out)
    tensors = out, partial, q, keys.k_cache, keys.v_cache, keys.page_table, lens, starts, sinks
    launch.attend(launch.grid, *tensors)
    if launch.merge is not None:
        launch.merge((q.shape[0], q.shape[1], 1), out, partial, sinks)


def bind(
    q: Tensor,
    keys: Keys,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
    borrow: Callable[[Tensor], Tensor],
) -> Callable[[], None] | None:
    """What launches `attention` with these arguments again; None where they have to be copied.

    Args:
        borrow: as in `attention_calls.heard_attention`.
    """
    vectors = [t for t in (seq_lens, cu_seqlens_q, keys.sinks) if t is not None]
    if not out.numel() or not all(vector.is_contiguous() for vector in vectors):
        return None
    launch = _launch_for(q, keys, None)
    partial = borrow(_between(launch, out))
    caches = keys.k_cache, keys.v_cache, keys.page_table
    attend = launch.attend.bound(
        launch.grid, out, partial, q, *caches, seq_lens, cu_seqlens_q, keys.sinks
    )
    if launch.merge is None:
        return attend
    merge = launch.merge.bound((q.shape[0], q.shape[1], 1), out, partial, keys.sinks)

    def both() -> None:
        attend()
        merge()

    return both


def _launch_for(q: Tensor, keys: Keys, tuning: Tuning | None) -> _Launch:
    k_cache, v_cache, table = keys.k_cache, keys.v_cache, keys.page_table
    return _launch(
        (q.shape, k_cache.shape, v_cache.shape, table.shape),
        (q.stride(), k_cache.stride(), v_cache.stride(), table.stride()),
        (q.dtype, k_cache.dtype, v_cache.dtype),
        keys.page_size,
        keys.scale,
        keys.window,
        keys.softcap,
        keys.sinks is not None,
        q.device,
        tuning,
    )


def _between(launch: _Launch, out: Tensor) -> Tensor:
    """The memory between the two kernels of `launch`; `out` where there is one kernel."""
    if not launch.partial:
        return out
    return torch.empty(launch.partial, dtype=torch.float32, device=out.device)


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
    block_dim_v = max(16, power_of_2(dim_v))
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
            max(16, power_of_2(dim)),
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
            power_of_2(splits),
            has_sinks,
        ),
        num_warps=min(8, max(1, power_of_2(splits) * block_dim_v // 1024)),
    )
    # Weighted sums, then the top score and the sum of weights of each row.
    partial = splits * tokens * heads * (dim_v + 2)
    return _Launch((blocks, kv_heads, splits), partial, attend, merge)


def _is_wide(q: torch.dtype, cache: torch.dtype) -> bool:
    return cache is not q and not is_float8(cache) and q is not torch.float32
