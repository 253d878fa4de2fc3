"""Greedy decoding of a `HybridTransformer` over its pool, in chunks and past the window."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swa_compile.kv import ForwardBatch, HybridKVPool


@dataclass
class Decoded:
    """What a run gave.

    Attributes:
        tokens: new tokens of each request.
        step_seconds: wall time of each decode step, the device drained.
        prefill_seconds: wall time of each prefill chunk, likewise.
    """

    tokens: list[list[int]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)


@torch.no_grad()
def greedy(
    forward: Callable[[ForwardBatch], Tensor],
    pool: HybridKVPool,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int,
    table_width: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Decoded:
    """Prefill `prompts` together, `chunk` tokens of each at a time, then decode greedily.

    Args:
        forward: a batch to next-token logits `[B, vocab]`.
        prompts: token ids, none empty.
        chunk: tokens per request and prefill step; what leaves the window is evicted in between.
        table_width: columns of the page table, the same for every step.
        progress: called with the number of tokens that a step brought.

    Raises:
        OutOfSlots: where the pool is too small; nothing of that step was written.
    """
    requests = [pool.open() for _ in prompts]
    result = Decoded([[] for _ in prompts])
    try:
        logits: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, max(map(len, prompts)), chunk):
            active = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
            pieces = [(requests[i], list(prompts[i][start : start + chunk])) for i in active]
            out = _timed(forward, pool, pieces, table_width, result.prefill_seconds)
            for row, i in enumerate(active):
                logits[i] = out[row]
            if progress is not None:
                progress(sum(len(ids) for _, ids in pieces))
        for step in range(max_new_tokens):
            for i, row_logits in enumerate(logits):
                assert row_logits is not None
                result.tokens[i].append(int(row_logits.argmax()))
            if step + 1 == max_new_tokens:
                break
            pieces = [(request, [result.tokens[i][-1]]) for i, request in enumerate(requests)]
            logits = list(_timed(forward, pool, pieces, table_width, result.step_seconds))
            if progress is not None:
                progress(len(pieces))
    finally:
        for request in requests:
            pool.close(request)
    return result


def _timed(
    forward: Callable[[ForwardBatch], Tensor],
    pool: HybridKVPool,
    pieces: list[tuple[int, list[int]]],
    table_width: int | None,
    seconds: list[float],
) -> Tensor:
    batch = pool.batch(pieces, width=table_width)
    start = time.perf_counter()
    out = forward(batch)
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
    return out
