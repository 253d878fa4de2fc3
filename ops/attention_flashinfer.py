"""Paged attention by FlashInfer: planned outside the forward, run inside it.

FlashInfer wants to know the lengths on the host before it runs. Who makes the batches knows them:

    attention = FlashInferAttention(tokens=64, requests=64, pages=64 * 512, device="cuda")
    with attention_kernel(attention):
        attention.plan(seq_lens, cu_seqlens_q)  # before every forward, ahead of a replay too
        model(batch)

A plan is not for one layer: layers that differ in heads, head dimension, window and the like have a
plan each, made when the first of them runs and again by each call of `plan`. Page ids are not part
of it. They are copied out of the page table inside the forward, from the first page that a query
sees on, by one small kernel: the table may be a translation that the forward itself makes, and
int64. FlashInfer's own ids, offsets and lengths are int32.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_reference import Keys
from .attention_sinks import weigh_sinks_in
from .checks import dtype_name, is_float8

_HEAD_DIMS = (64, 128, 256)


@cache
def missing(device: torch.device) -> str | None:
    """Why it cannot run on `device` at all; None where it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (the extra [flashinfer])"
    if importlib.util.find_spec("triton") is None:
        return "triton, which copies the page ids, is not installed"
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


def refusal(q: Tensor, keys: Keys) -> str | None:
    """Why it cannot compute this call; None where it can."""
    k_cache, v_cache = keys.k_cache, keys.v_cache
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q is {dtype_name(q.dtype)}; it takes float16 and bfloat16"
    if k_cache.dtype is not v_cache.dtype:
        return "k_cache and v_cache differ in dtype"
    if k_cache.dtype is not q.dtype and k_cache.dtype not in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        return f"the caches are {dtype_name(k_cache.dtype)}; it takes q's dtype and float8"
    if q.shape[2] != v_cache.shape[2] or q.shape[2] not in _HEAD_DIMS:
        return (
            f"head dimensions {q.shape[2]} and {v_cache.shape[2]}; it takes equal ones of "
            "64, 128 or 256"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(2) != 1:
        return "k_cache and v_cache need the same strides and a dense last dimension"
    return None


class Kind(NamedTuple):
    """What a plan depends on beside the lengths."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    window: int | None
    softcap: float
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype


class Lengths(NamedTuple):
    """A batch as FlashInfer is told about it; int32 on the host."""

    queries: Tensor  # [B + 1], offsets of the queries
    pages: Tensor  # [B + 1], offsets of the pages
    last_page: Tensor  # [B], tokens in the last page
    first_page: Tensor  # [B], the table's column where a request's pages begin; -1: it has none


def lengths_of(
    seq_lens: Tensor, cu_seqlens_q: Tensor, page_size: int, window: int | None
) -> Lengths:
    """What FlashInfer is told about a batch.

    Pages left of the window are left out: it would read them, and weigh them with zero. A request
    without tokens in the cache gets as many as it has queries, all in page 0, the sink, since
    FlashInfer cannot have more queries than keys; its result is thrown away.
    """
    counts = cu_seqlens_q.diff()
    lens = torch.where(seq_lens > 0, seq_lens, counts)
    first = torch.zeros_like(lens)
    if window is not None:
        first = (lens - counts - window + 1).clamp_min(0) // page_size
    pages = -(-lens // page_size) - first
    pages = torch.where(counts > 0, pages, 0)
    last_page = torch.where(pages > 0, (lens - 1) % page_size + 1, 0)
    offsets = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    first = torch.where((seq_lens > 0) & (counts > 0), first, -1)
    return Lengths(cu_seqlens_q.clone(), offsets, last_page.int(), first.int())


class FlashInferAttention:
    """FlashInfer over batches of at most `tokens` queries of exactly `requests` requests.

    Its buffers stay where they are, so a forward that ran once can be captured in a CUDA graph and
    replayed after each further `plan`. One object serves one size of batch.

    Args:
        tokens: N, the rows of q.
        requests: B; padding requests, of length 0, count.
        pages: the most pages that the requests of a batch have together, at the smallest page
            size in use.
        device: where it runs.
        workspace: uint8, FlashInfer's scratch memory; 128 MB by default. Objects whose forwards do
            not overlap may share one.

    Raises:
        RuntimeError: FlashInfer cannot be used on the device.
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        tokens: int,
        requests: int,
        pages: int,
        device: torch.device | str,
        workspace: Tensor | None = None,
    ) -> None:
        if (reason := missing(torch.device(device))) is not None:
            raise RuntimeError(f"FlashInferAttention: {reason}")
        self.device = torch.empty(0, device=device).device  # with its index
        if workspace is None:
            workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=self.device)
        self.tokens, self.requests, self.pages = tokens, requests, pages
        self._workspace = workspace
        self._dead = torch.ones(tokens, dtype=torch.bool, device=self.device)
        self._plans: dict[Kind, _Plan] = {}
        self._batch: tuple[Tensor, Tensor] | None = None
        self._copied = torch.cuda.Event()

    def plan(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
        """Plan the coming forwards, outside of any capture.

        Args:
            seq_lens: int32 or int64 `[B]` on the host, tokens in the cache, new ones included.
            cu_seqlens_q: int32 or int64 `[B + 1]` on the host, where each request's queries start.

        Raises:
            TypeError, ValueError: dtype, device or size is wrong, or the batch does not fit.
        """
        for name, lengths, size in (
            ("seq_lens", seq_lens, self.requests),
            ("cu_seqlens_q", cu_seqlens_q, self.requests + 1),
        ):
            if lengths.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"plan: '{name}' must be int32 or int64, got {lengths.dtype}")
            if not lengths.is_cpu or lengths.shape != (size,):
                raise ValueError(
                    f"plan: '{name}' must be of shape [{size}] on the host, got "
                    f"{list(lengths.shape)} on {lengths.device}"
                )
        queries = int(cu_seqlens_q[-1])
        if queries > self.tokens:
            raise ValueError(f"plan: {queries} queries, but it was made for {self.tokens}")
        seq_lens, cu_seqlens_q = seq_lens.int(), cu_seqlens_q.int()
        self._copied.synchronize()  # of the last plan; its pinned memory is written again
        counts = cu_seqlens_q.diff()
        dead = torch.ones(self.tokens, dtype=torch.bool, pin_memory=True)
        dead[:queries] = torch.repeat_interleave(seq_lens <= 0, counts)
        self._dead.copy_(dead, non_blocking=True)
        self._batch = seq_lens, cu_seqlens_q
        for plan in self._plans.values():
            plan.update(seq_lens, cu_seqlens_q)
        self._copied.record()

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on `device` at all; None where it can."""
        return missing(device)

    def refusal(self, q: Tensor, keys: Keys) -> str | None:
        """Why it cannot compute this call; None where it can."""
        if self._batch is None:
            return "there is no plan yet: call plan(seq_lens, cu_seqlens_q) before the forward"
        if q.shape[0] > self.tokens or keys.page_table.shape[0] != self.requests:
            return (
                f"{q.shape[0]} queries of {keys.page_table.shape[0]} requests; it was made for at "
                f"most {self.tokens} queries of {self.requests} requests"
            )
        if _kind(q, keys) not in self._plans and torch.cuda.is_current_stream_capturing():
            return "a layer of this kind has not run before the capture, so it has no plan"
        return refusal(q, keys)

    @torch.no_grad()
    def run(
        self, q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor
    ) -> None:
        """Attention of `q` over `keys` into `out`, by the plan; the lengths have to be its."""
        kind = _kind(q, keys)
        if kind not in self._plans:
            assert self._batch is not None
            plan = _Plan(kind, self)
            plan.update(*self._batch)
            self._copied.record()
            self._plans[kind] = plan
        self._plans[kind].run(q, keys, out)
        # Rows of padding, and those behind the last query, which were not written.
        out.masked_fill_(self._dead[: q.shape[0], None, None], 0.0)


class _Plan:
    """FlashInfer's wrapper for one kind of layer, with the buffers that it reads."""

    def __init__(self, kind: Kind, owner: FlashInferAttention) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=owner.device)

        self.kind, self.tokens = kind, owner.tokens
        self.indices, self.offsets = buffer(owner.pages), buffer(owner.requests + 1)
        self.first_page = buffer(owner.requests)
        self.wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            owner._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffer(owner.requests + 1),
            paged_kv_indptr_buf=self.offsets,
            paged_kv_indices_buf=self.indices,
            paged_kv_last_page_len_buf=buffer(owner.requests),
            # The kernels for Hopper multiply operands of one dtype.
            backend="fa2" if is_float8(kind.cache_dtype) else "auto",
        )
        # The first plan sets how many queries a captured graph has room for.
        full = torch.zeros(owner.requests + 1, dtype=torch.int32)
        full[1:] = owner.tokens
        self._plan(lengths_of(full.diff(), full, kind.page_size, kind.window))

    def update(self, seq_lens: Tensor, cu_seqlens_q: Tensor) -> None:
        """Plan for a batch."""
        self._plan(lengths_of(seq_lens, cu_seqlens_q, self.kind.page_size, self.kind.window))

    def _plan(self, lengths: Lengths) -> None:
        pages = int(lengths.pages[-1])
        if pages > self.indices.shape[0]:
            raise ValueError(
                f"the batch has {pages} pages, but FlashInferAttention was made for "
                f"{self.indices.shape[0]}"
            )
        kind = self.kind
        self.first_page.copy_(lengths.first_page.pin_memory(), non_blocking=True)
        self.wrapper.plan(
            lengths.queries,
            lengths.pages,
            self.indices[:pages],
            lengths.last_page,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            kind.page_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.cache_dtype,
        )

    def run(self, q: Tensor, keys: Keys, out: Tensor) -> None:
        from .attention_pages import copy_pages

        copy_pages(keys.page_table, self.first_page, self.offsets, self.indices)
        caches = tuple(_pages(cache_, keys.page_size) for cache_ in (keys.k_cache, keys.v_cache))
        if q.stride(2) != 1:
            q = q.contiguous()
        if keys.sinks is None:
            self.wrapper.run(q, caches, out=out)
        else:
            _, lse = self.wrapper.run(q, caches, out=out, return_lse=True)
            weigh_sinks_in(out, lse * math.log(2.0), keys.sinks)  # it counts in powers of 2


def _kind(q: Tensor, keys: Keys) -> Kind:
    return Kind(
        q.shape[1],
        keys.k_cache.shape[1],
        q.shape[2],
        keys.page_size,
        keys.window,
        keys.softcap,
        keys.scale,
        q.dtype,
        keys.k_cache.dtype,
    )


def _pages(cache_: Tensor, page_size: int) -> Tensor:
    """`[rows, H, D]` as `[pages, page_size, H, D]`, the same memory."""
    pages = cache_.shape[0] // page_size
    return cache_[: pages * page_size].unflatten(0, (pages, page_size))
