"""Interleaved timing: all steps take turns, in an order drawn anew for each round.

A slow moment then hits all of them, and none is always measured behind the same other one.

On a GPU each sample is taken twice. `gpu`: CUDA events around one step, behind an untimed one of
the same kind, so that the host is ahead and the card's L2 is as this step leaves it. `wall`: the
host's clock around one step and the synchronization behind it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Samples = dict[str, list[float]]


def interleaved(
    steps: Mapping[str, Callable[[], Any]], runs: int, device: torch.device
) -> dict[str, Samples]:
    """Milliseconds of `runs` samples of each step: {name: {"gpu": [...], "wall": [...]}}.

    "gpu" is missing where there is none.
    """
    samples: dict[str, Samples] = {name: {"wall": []} for name in steps}
    gpu = device.type == "cuda"
    order = random.Random(0)
    for _ in range(runs):
        events = {}
        for name, step in order.sample(list(steps.items()), len(steps)):
            if gpu:
                step()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                step()
                end.record()
                events[name] = (start, end)
                torch.cuda.synchronize()
            before = time.perf_counter()
            step()
            if gpu:
                torch.cuda.synchronize()
            samples[name]["wall"].append((time.perf_counter() - before) * 1e3)
        for name, (start, end) in events.items():
            samples[name].setdefault("gpu", []).append(start.elapsed_time(end))
    return samples


def summary(samples: list[float]) -> dict[str, Any]:
    """Median and quartiles of `samples`, and the samples themselves, in their unit."""
    low, middle, high = statistics.quantiles(samples if len(samples) > 1 else samples * 2, n=4)
    return {
        "median": round(middle, 6),
        "q1": round(low, 6),
        "q3": round(high, 6),
        "samples": [round(sample, 5) for sample in samples],
    }
