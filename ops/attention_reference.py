"""The rule of paged attention, on dense operands in float32, and what a call says of its keys.

`attention_gather` brings the keys of paged caches into that form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import is_float8


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The rule of attention, on dense operands in float32.

    Args:
        q: `[R, n, H_q, D]`.
        k, v: `[R, T, H_kv, D]`, `[R, T, H_kv, D_v]`.
        visible: bool `[R, n, T]`: which keys a query sees; None for all.

    Returns:
        `[R, n, H_q, D_v]`, zeros where a query sees nothing.
    """
    rows, count, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.view(rows, count, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("rnhgd,rthd->rhgnt", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("rhgnt,rthd->rnhgd", weights, v).reshape(rows, count, heads, -1)


class Keys(NamedTuple):
    """Where keys lie and how they are attended to: what all queries of a call share.

    Attributes:
        rule: attends to dense operands, as `attend` does.
    """

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    page_size: int
    window: int | None
    scale: float
    softcap: float
    sinks: Tensor | None
    rule: Callable[..., Tensor] = attend

    def attend(
        self,
        q: Tensor,
        slots: Tensor,
        *,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """The rule over the rows of the caches at `slots`.

        Args:
            q: `[R, n, H_q, D]`.
            slots: int64 `[R, T]`, rows of the caches.
            visible: bool `[R, n, T]`: which of them a query sees; None for all.
            seen: bool `[R, T]`: which of them any query sees; None for all. What the others hold
                has no effect.

        Returns:
            float32 `[R, n, H_q, D_v]`.
        """
        k, v = _rows(self.k_cache, slots), _rows(self.v_cache, slots)
        if seen is not None:
            unseen = ~seen[:, :, None, None]
            # Zeros, not only a weight of zero: 0 times NaN is NaN.
            k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        return self.rule(
            q.float(), k, v, visible, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    # On a CPU `cache[slots]` goes element by element, several times slower.
    if is_float8(cache.dtype):  # selecting knows no float8; its bytes are as good
        rows = cache.view(torch.uint8).index_select(0, slots.flatten()).view(cache.dtype)
    else:
        rows = cache.index_select(0, slots.flatten())
    return rows.unflatten(0, slots.shape).float()
