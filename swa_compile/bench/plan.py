"""What `--targets` measures, in the order of what is wanted first, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swa_compile.bench.configs import CONFIGS, BenchConfig, Shape
from swa_compile.bench.record import Record, Row
from swa_compile.bench.steps import Say, measure, row_name
from swa_compile.bench.variants import VARIANTS, Variant, chosen


@dataclass(frozen=True)
class Job:
    """One row of the record: its name, and what measures it."""

    name: str
    run: Callable[[Say], Row]


def step_job(
    config: BenchConfig,
    shape: Shape,
    variants: Sequence[Variant],
    device: torch.device,
    runs: int,
) -> Job:
    """The row of one decode step."""

    def run(say: Say) -> Row:
        return measure(config, shape, variants, device, runs=runs, say=say)

    return Job(row_name(config, shape), run)


# (config, batch, window): that of the targets first.
_STEPS = (
    ("ref24", 64, 128),
    ("ref24", 1, 128),
    ("ref24", 256, 1024),
    ("ref24", 128, 4096),
    ("gpt-oss-20b", 64, 128),
    ("gemma-3", 64, 1024),
    ("ref24", 64, 1024),
    ("ref24", 1, 1024),
    ("ref24", 256, 128),
)


def target_jobs(device: torch.device, runs: int, variants: Sequence[str] = ()) -> Iterator[Job]:
    """Everything that design/targets asks for; on the CPU, the same with the small model."""
    if device.type != "cuda":
        config = CONFIGS["small"]
        yield step_job(config, Shape.of(config, 4), chosen(list(variants)), device, runs)
    else:
        for name, batch, window in _STEPS:
            config = CONFIGS[name]
            picked = chosen(list(variants))
            if not variants and batch != 64:
                # Their targets are for B=64, and each is another compilation.
                piecewise = ("inductor-piecewise", "swa-piecewise")
                picked = [VARIANTS[v] for v in VARIANTS if v not in piecewise]
            yield step_job(config, Shape.of(config, batch, window), picked, device, runs)


def carry_out(
    jobs: Iterator[Job] | Sequence[Job],
    record: Record,
    *,
    budget: float | None = None,
    say: Say = print,
) -> list[str]:
    """Run the jobs whose row `record` lacks; the names of those that were left for want of time.

    A job is started only where `budget` seconds leave as much as the longest one so far took. One
    that fails is kept as a row with an "error"; the next run tries it again.
    """
    begun = time.perf_counter()
    longest = 0.0
    left = []
    for job in jobs:
        if "error" not in record.rows.get(job.name, {"error": ""}):
            say(f"{job.name}: measured before")
            continue
        start = time.perf_counter()
        if budget is not None and start - begun + longest > budget:
            left.append(job.name)
            continue
        try:
            row = job.run(_prefixed(say, job.name))
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            row = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]}
        seconds = time.perf_counter() - start
        longest = max(longest, seconds)
        record.add(job.name, {**row, "seconds": round(seconds, 1)})
    return left


def _prefixed(say: Say, name: str) -> Say:
    return lambda what: say(f"{name}: {what}")
