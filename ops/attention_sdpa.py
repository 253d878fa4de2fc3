"""Paged attention by torch's `scaled_dot_product_attention` over gathered keys.

For devices that no other kernel serves, the CPU first. The gather, its chunks and what is masked
are `attention_gather`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention_gather import attention_by_device
from .attention_reference import Keys


def refusal(q: Tensor, keys: Keys) -> str | None:
    """Why it cannot compute this call; None where it can."""
    return f"softcap {keys.softcap}; it has none" if keys.softcap else None


def attention(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor) -> None:
    """Attention of `q` `[N, H_q, D]` over `keys` into `out` `[N, H_q, D_v]`, in float32."""
    attention_by_device(q, keys._replace(rule=attend_by_sdpa), seq_lens, cu_seqlens_q, out)


def attend_by_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """`attention_reference.attend` without softcap. The query heads of a KV head become queries.

    A sink is one more key, of zeros, whose bias is the sink's logit and whose value is zero.
    """
    assert not softcap
    rows, count, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    grouped = q.view(rows, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, group * count, dim)
    mask = None if visible is None else visible[:, None, None]  # [R, H_kv, G, n, T]
    if sinks is not None:
        bias = torch.zeros(
            (1 if mask is None else rows, kv_heads, group, count, k.shape[1] + 1),
            dtype=q.dtype,
            device=q.device,
        )
        bias[..., -1] = sinks.view(kv_heads, group, 1)
        if mask is not None:
            bias[..., :-1].masked_fill_(~mask, -torch.inf)
        mask = bias
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
    if mask is not None:
        mask = mask.expand(-1, -1, group, -1, -1).flatten(2, 3)
    out = scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    out = out.view(rows, kv_heads, group, count, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows, count, heads, -1)
    if visible is None:
        return out
    return out.masked_fill(~visible.any(-1)[:, :, None, None], 0.0)
