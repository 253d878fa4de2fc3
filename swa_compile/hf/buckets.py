"""Decode batches of a few sizes, captured ahead: where they are used, and which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from swa_compile.hf.bridge import Bridge, Forward
from swa_compile.hf.compiling import LEAST, compiles
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.runner import BucketRunner

_WHOLE = ("full", "auto")  # where a decode step is one graph
_CAPTURING = (*_WHOLE, "piecewise")


def forward_in_buckets(
    bridge: Bridge,
    pool: HybridKVPool,
    backend: Any,
    options: dict[str, Any] | None,
    capture_sizes: Sequence[int] | None,
    max_requests: int,
) -> Callable[[ForwardBatch], Tensor]:
    """A `Forward`, in a `BucketRunner` where there are sizes for it (see `bucket_sizes`)."""
    sizes = bucket_sizes(capture_sizes, backend, options, bridge.model.device, max_requests)
    if not sizes:
        return Forward(bridge, pool, backend, options)
    around = backend == "swa" and (options or {}).get("cudagraphs", "auto") in _WHOLE
    if backend == "swa":
        # What is larger is never captured: the sizes of prompts come and go.
        options = {**(options or {}), "capture_sizes": list(sizes)}
    forward = Forward(bridge, pool, backend, options)
    # `Forward` marks the sizes itself, and nothing is captured where no backend does. Around it,
    # as the guards of a transformers model take longer than many a step on a GPU.
    return BucketRunner(forward, sizes, dynamic=False, capture=False, around=around)


def bucket_sizes(
    capture_sizes: Sequence[int] | None,
    backend: Any,
    options: dict[str, Any] | None,
    device: torch.device,
    max_requests: int,
) -> tuple[int, ...]:
    """Token counts that batches are padded to; none where they are not.

    Args:
        capture_sizes: asked for; None for the option of that name, or, where that is not given
            either, powers of 2 up to `max_requests` on a GPU where `backend` captures.
        backend, options: of torch.compile.
    """
    if capture_sizes is not None:
        return _padded(capture_sizes, backend)
    options = options or {}
    if backend != "swa" or options.get("cudagraphs", "auto") not in _CAPTURING:
        return ()
    if device.type != "cuda":
        return ()
    if options.get("capture_sizes"):
        return _padded(options["capture_sizes"], backend)
    most = max(max_requests, LEAST)
    powers = [1 << i for i in range(1, most.bit_length()) if 1 << i < most]
    return (*powers, most)


def _padded(sizes: Sequence[int], backend: Any) -> tuple[int, ...]:
    """`sizes` as `Forward` runs them: one of 1 would be that of `LEAST` at other addresses."""
    if not compiles(backend):
        return tuple(sizes)
    return tuple(LEAST if type(size) is int and size == 1 else size for size in sizes)
