"""The operator `swa::paged_attention`: causal, sliding-window, with softcap and sinks.

Its rule, which stands in `attention_reference`, runs on every device; `attention_choice` says which
kernel computes a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_calls import tell
from .attention_checks import check_contents, check_inputs, looks_right
from .attention_choice import choose
from .attention_reference import Keys
from .checks import Size
from .library import define


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_size: int = 1,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries over the paged caches of their requests.

    Query i of a request with `n_q` new tokens stands at position `seq_len - n_q + i` and sees the
    keys at positions up to its own, the last `window` of them where a window is given. The token
    at position t of request b lies in row `page_table[b, t // page_size] * page_size + t %
    page_size` of the caches.

    Args:
        q: `[N, H_q, D]`, the requests' new tokens one after another.
        k_cache: `[rows, H_kv, D]`; H_q is a multiple of H_kv (grouped-query attention). float8
            caches are read as they are, without a scale.
        v_cache: `[rows, H_kv, D_v]`.
        page_table: int32 or int64 `[B, P]`; entries that no query sees are not read.
        seq_lens: int32 or int64 `[B]`, tokens in the cache, new ones included.
        cu_seqlens_q: int32 or int64 `[B + 1]`, where each request's queries start, from 0; the
            last value is their number, at most N.
        page_size: tokens per page.
        scale: factor on the scores, `D ** -0.5` by default.
        window: number of keys a query sees, itself included (`sliding_window` of Hugging Face
            models); None for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118);
            0 for none.
        sinks: `[H_q]`, logits that take part in the softmax's denominator alone (gpt-oss,
            arXiv:2508.10925).

    Returns:
        `[N, H_q, D_v]` in q's dtype; scores and sums are float32. Zeros in rows past
        `cu_seqlens_q[-1]` and for requests with `seq_len == 0`.

    Raises:
        TypeError, ValueError: dtype, rank, device or size is wrong, or (on the CPU) lengths
            contradict each other or a key that a query sees lies outside the caches.
    """
    return _OP(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_seqlens_q,
        page_size=page_size,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_size: int = 1,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    args = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q)
    if not looks_right(*args, page_size, window, softcap, sinks):
        check_inputs(*args, page_size, window, softcap, sinks)
    tokens, heads, dim = q.shape
    if q.is_cpu:  # elsewhere it would take a synchronization
        rows = min(k_cache.shape[0], v_cache.shape[0])
        check_contents(tokens, rows, page_table, seq_lens, cu_seqlens_q, page_size, window)
    out = torch.empty((tokens, heads, v_cache.shape[2]), dtype=q.dtype, device=q.device)
    if not out.numel() or not page_table.numel():
        return out.zero_()
    if scale is None:
        scale = dim**-0.5
    keys = Keys(k_cache, v_cache, page_table, page_size, window, scale, softcap, sinks)
    kernel = choose(q, keys)
    kernel.run(q, keys, seq_lens, cu_seqlens_q, out)
    tell(kernel, q, keys, seq_lens, cu_seqlens_q, out)
    return out


def _fake_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    page_size: Size = 1,
    scale: float | None = None,
    window: Size | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The checks and the empty result, with or without data."""
    check_inputs(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_seqlens_q,
        page_size,
        window,
        softcap,
        sinks,
    )
    return torch.empty((q.shape[0], q.shape[1], v_cache.shape[2]), dtype=q.dtype, device=q.device)


_OP = define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table,"
    " Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt page_size=1, float? scale=None,"
    " SymInt? window=None, float softcap=0.0, Tensor? sinks=None) -> Tensor",
    fake=_fake_attention,
    every=_attention,
)
