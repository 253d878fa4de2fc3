"""Paged attention by torch's `varlen_attn_out` with a block table (torch 2.13 and newer).

FlashAttention 2, or what `torch.nn.attention.activate_flash_attention_impl` put in its place. The
block table, the lengths and the offsets are int32. It reads whole tiles and weighs with zero what
lies left of a window, so rows there have to be finite numbers.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor

from .attention_reference import Keys
from .attention_sinks import weigh_sinks_in
from .checks import dtype_name


@cache
def missing(device: torch.device) -> str | None:
    """Why it cannot run on `device` at all; None where it can."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    operator = getattr(varlen, "varlen_attn_out", None)
    if operator is None or "block_table" not in inspect.signature(operator).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no block_table"
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


def refusal(q: Tensor, keys: Keys) -> str | None:
    """Why it cannot compute this call; None where it can."""
    k_cache, v_cache, dim = keys.k_cache, keys.v_cache, q.shape[2]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q is {dtype_name(q.dtype)}; it takes float16 and bfloat16"
    for name, cache_ in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache_.dtype is not q.dtype:
            return f"{name} is {dtype_name(cache_.dtype)}; it takes q's dtype alone"
        if cache_.stride(2) != 1:
            return f"{name} has strides {cache_.stride()}; it takes a dense last dimension"
    if v_cache.shape[2] != dim or dim % 8 or dim > 256:
        return (
            f"head dimensions {dim} and {v_cache.shape[2]}; it takes equal ones, multiples of 8 "
            "up to 256"
        )
    if keys.page_size % 256 and _implementation() is None:
        return f"page_size {keys.page_size}; FlashAttention 2 takes multiples of 256"
    if keys.softcap:
        return f"softcap {keys.softcap}; it has none"
    if keys.page_table.dtype is not torch.int32:
        return "page_table is int64; it takes int32"
    if keys.page_table.stride(1) != 1 and keys.page_table.shape[1] > 1:
        return "page_table is strided; it takes dense rows"
    return None


@torch.no_grad()
def attention(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor) -> None:
    """Attention of `q` `[N, H_q, D]` over `keys` into `out`; `refusal` is None.

    Lengths on the device are never read back, so the longest that the sizes allow stand for them.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    out.zero_()  # rows behind the last query are not written
    k_cache, v_cache = (_pages(t, keys.page_size) for t in (keys.k_cache, keys.v_cache))
    lens, starts = seq_lens.to(torch.int32), cu_seqlens_q.to(torch.int32)
    _, lse = varlen_attn_out(
        out,
        q if q.stride(2) == 1 else q.contiguous(),
        k_cache,
        v_cache,
        starts,
        starts,  # of the right form; with a block table the offsets of keys are not read
        # One query per request is a promise that sizes cannot make.
        max(2, q.shape[0]),
        keys.page_table.shape[1] * keys.page_size,
        return_aux=AuxRequest(lse=True),
        scale=keys.scale,
        window_size=(-1, 0) if keys.window is None else (keys.window - 1, 0),
        enable_gqa=True,
        seqused_k=lens,
        block_table=keys.page_table,
    )
    if keys.sinks is not None:
        weigh_sinks_in(out, lse.t(), keys.sinks)


def _pages(cache_: Tensor, page_size: int) -> Tensor:
    """`[rows, H, D]` as `[pages, page_size, H, D]`, the same memory."""
    pages = cache_.shape[0] // page_size
    return cache_[: pages * page_size].unflatten(0, (pages, page_size))


def _implementation() -> str | None:
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl()
