"""Which kernels a step launches, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# First match wins. Inductor's kernels are named after the operators in them, so they come first.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("generated", ("triton_",)),
    ("memset, memcpy", ("memset", "memcpy")),
    ("attention", ("flash", "fmha", "attention", "batchdecode", "varlen")),
    ("gemm", ("gemm", "gemv", "nvjet", "splitk", "cutlass", "xmma", "cublas")),
    ("translation", ("_translate",)),
    ("store", ("_store", "index_put", "index_copy")),
)

# Our own, by their whole names.
_OURS = {"attend": "attention", "merge": "attention", "rows": "fused rows"}

# Kernels that a profile lists by name, those with the most time first.
_NAMES = 40


@dataclass(frozen=True)
class Kernel:
    """One launch (or memory operation) on the card, in microseconds."""

    name: str
    us: float


def kind_of(name: str) -> str:
    """The class of a kernel in the tables, by its name."""
    if name in _OURS:
        return _OURS[name]
    lowered = name.lower()
    for kind, parts in _KINDS:
        if kind == "generated":
            if lowered.startswith(parts):
                return kind
        elif any(part in lowered for part in parts):
            return kind
    return "other"


def kernels_of(step: Callable[[], Any]) -> list[Kernel]:
    """What one call of `step` runs on the GPU, in order."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [
        event
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    events.sort(key=lambda event: event.time_range.start)
    return [Kernel(event.name, event.time_range.elapsed_us()) for event in events]


def profile_step(step: Callable[[], Any], repeats: int = 5) -> dict[str, Any]:
    """Launches and microseconds of one call of `step`: in all, by kind and by kernel.

    Times are medians over `repeats` calls; so is the number of launches, which is the same in each.
    """
    runs = [kernels_of(step) for _ in range(repeats)]
    runs = sorted(runs, key=lambda run: sum(kernel.us for kernel in run))
    middle = runs[len(runs) // 2]
    kinds: dict[str, dict[str, float]] = {}
    names: dict[str, dict[str, float]] = {}
    for kernel in middle:
        for table, key in ((kinds, kind_of(kernel.name)), (names, kernel.name[:120])):
            entry = table.setdefault(key, {"launches": 0, "us": 0.0})
            entry["launches"] += 1
            entry["us"] = round(entry["us"] + kernel.us, 2)
    return {
        "launches": len(middle),
        "us": round(sum(kernel.us for kernel in middle), 2),
        "kinds": _longest_first(kinds),
        "names": dict(list(_longest_first(names).items())[:_NAMES]),
    }


def _longest_first(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return dict(sorted(table.items(), key=lambda item: -item[1]["us"]))
