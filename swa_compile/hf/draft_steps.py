"""One batch of tokens cut into the steps of a multi-step draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn import functional as F

from swa_compile.kv import ForwardBatch
from swa_compile.kv.host import on_device


@dataclass
class LaterSteps:
    """Index tensors of the draft steps after the first: one token of a request in each.

    Requests that take part in a step stand ahead of those that do not.
    """

    positions: Tensor  # int64 [steps, B]; 0 where none takes part
    out_cache_loc: Tensor  # int64 [steps, B]: full slots; 0, the sink, where none takes part
    seq_lens: Tensor  # int32 [steps, B]; 0 where none takes part
    cu_seqlens_q: Tensor  # int32 [steps, B + 1]

    def step(self, i: int, input_ids: Tensor, first: ForwardBatch) -> ForwardBatch:
        """The batch of step `i`, with the pages that `first` has for all steps."""
        return ForwardBatch(
            input_ids=input_ids,
            positions=self.positions[i],
            out_cache_loc=self.out_cache_loc[i],
            page_table=first.page_table,
            seq_lens=self.seq_lens[i],
            cu_seqlens_q=self.cu_seqlens_q[i],
            full_to_swa_index_mapping=first.full_to_swa_index_mapping,
        )


@dataclass(frozen=True)
class Span:
    """The new tokens of one request in a batch: `first` of them, then `later` steps of one each.

    Attributes:
        length: tokens in the cache after the first step.
    """

    first: int
    later: int
    length: int


def cut(
    whole: ForwardBatch, spans: Sequence[Span], steps: int, rows: int, tokens: int
) -> tuple[ForwardBatch, LaterSteps]:
    """The first step of a batch, and `steps` later ones.

    Args:
        whole: all tokens of all requests, with their slots.
        spans: of its requests, those with the most later steps first.
        rows, tokens: least B, and least N of the first step; padding is harmless.
    """
    padding = rows - len(spans)
    none = whole.input_ids.shape[0]  # the lane of padding, behind all others
    first: list[int] = []
    later = [[none] * rows for _ in range(steps)]
    start = 0
    for row, span in enumerate(spans):
        first += range(start, start + span.first)
        start += span.first
        for i in range(span.later):
            later[i][row] = start + i
        start += span.later
    tokens = max(len(first), tokens)
    first += [none] * (tokens - len(first))

    zeros = [0] * padding
    ends = [0, *accumulate([span.first for span in spans] + zeros)]
    sizes = [[*(span.length for span in spans), *zeros, *ends]]
    for i in range(1, steps + 1):
        lengths = [span.length + i if span.later >= i else 0 for span in spans]
        active = sum(length > 0 for length in lengths)
        sizes.append([*lengths, *zeros, *(min(row, active) for row in range(rows + 1))])

    device = whole.positions.device
    lanes = on_device(list(chain(first, *later)), torch.int64, device)
    positions = F.pad(whole.positions, (0, 1))[lanes]
    loc = F.pad(whole.out_cache_loc, (0, 1))[lanes]
    size = on_device(sizes, torch.int32, device)
    seq_lens, offsets = size[:, :rows].contiguous(), size[:, rows:].contiguous()
    batch = ForwardBatch(
        input_ids=F.pad(whole.input_ids, (0, 1))[lanes[:tokens]],
        positions=positions[:tokens],
        out_cache_loc=loc[:tokens],
        page_table=F.pad(whole.page_table, (0, 0, 0, padding)),
        seq_lens=seq_lens[0],
        cu_seqlens_q=offsets[0],
        full_to_swa_index_mapping=whole.full_to_swa_index_mapping,
    )
    return batch, LaterSteps(
        positions=positions[tokens:].view(steps, rows),
        out_cache_loc=loc[tokens:].view(steps, rows),
        seq_lens=seq_lens[1:],
        cu_seqlens_q=offsets[1:],
    )
