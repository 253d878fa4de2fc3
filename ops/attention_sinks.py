"""Attention sinks for kernels that have none, from the log-sum-exp they give."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def weigh_sinks_in(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give the sinks their share of the softmax's denominator, in place.

    The result without sinks is divided by exp(lse); with them by exp(lse) + exp(sink).

    Args:
        out: `[N, H, D_v]`, zeros where a row saw no key.
        lse: float32 `[N, H]`, natural logarithm; anything where a row saw no key.
        sinks: `[H]`, logits.
    """
    share = torch.sigmoid(lse - sinks.float())
    out.mul_(share.nan_to_num_(0.0)[:, :, None])
