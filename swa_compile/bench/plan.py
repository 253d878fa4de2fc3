"""What `--targets` measures, in the order of what is wanted first, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swa_compile.bench.configs import CONFIGS, BenchConfig, Shape
from swa_compile.bench.depth import measure as measure_depth
from swa_compile.bench.pass_time import measure as measure_passes
from swa_compile.bench.prefetch import default_jobs, prefetch
from swa_compile.bench.prologue import measure as measure_prologue
from swa_compile.bench.record import Record, Row
from swa_compile.bench.sizes import measure as measure_sizes
from swa_compile.bench.start import measure as measure_start
from swa_compile.bench.steps import Say, measure, row_name
from swa_compile.bench.stores import measure as measure_stores
from swa_compile.bench.variants import Variant, chosen


@dataclass(frozen=True)
class Job:
    """One row of the record: its name, what measures it, and the variants that it has to have."""

    name: str
    run: Callable[[Say], Row]
    variants: tuple[str, ...] = ()

    def done_by(self, row: Row | None) -> bool:
        """Whether `row`, of an earlier run, holds what this job would measure."""
        if row is None or "error" in row:
            return False
        entries = row.get("variants", {})
        broken = any(entry["status"] in ("wrong", "failed") for entry in entries.values())
        return not broken and set(self.variants) <= set(entries)


def step_job(
    config: BenchConfig,
    shape: Shape,
    variants: Sequence[Variant],
    device: torch.device,
    runs: int,
    jobs: int | None = None,
) -> Job:
    """The row of one decode step; `jobs` processes compile for it ahead (None: by the machine)."""

    def run(say: Say) -> Row:
        count = default_jobs(config, device) if jobs is None else jobs
        if count > 1:
            say(f"compiling ahead, {count} at a time")
            failed = prefetch(config, shape, variants, device, count)
            if failed:
                say(f"not compiled ahead: {', '.join(failed)}")
        return measure(config, shape, variants, device, runs=runs, say=say)

    return Job(row_name(config, shape), run, tuple(variant.name for variant in variants))


# (config, batch, window)
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


def target_jobs(
    device: torch.device,
    runs: int,
    *,
    quick: bool = False,
    variants: Sequence[str] = (),
    jobs: int | None = None,
) -> list[Job]:
    """Everything that the targets ask for, what is wanted most first.

    On a CPU the same in small. `quick` leaves out depth and repetition, so that every kind of row
    is seen in a few minutes.
    """
    gpu = device.type == "cuda"
    small = CONFIGS["small"]
    steps = []
    for name, batch, window in _STEPS if gpu else (("small", 4, None),):
        config = CONFIGS[name]
        shape = Shape.of(config, batch, window)
        steps.append(step_job(config, shape, chosen(variants), device, runs, jobs))
    if quick:
        del steps[1:]
    table = (256, 131_072) if gpu else (8, 1024)
    depths = (1, 24, 96) if gpu and not quick else (1, 3)
    config = CONFIGS["ref24"] if gpu else small
    start_shape = Shape.of(config, 64 if gpu else 4)
    compilations = 2 if quick or not gpu else 10
    pass_depths = (8, 16) if quick else (32, 64, 128, 192)

    def stores(batch: int) -> Job:
        return Job(
            f"stores/B{batch}",
            lambda say: measure_stores(
                batch,
                device,
                compilations=compilations,
                runs=runs,
                config=None if gpu else small,
                say=say,
            ),
        )

    further = [
        *[stores(batch) for batch in ((64, 256) if gpu and not quick else (64,))],
        Job(
            f"prologue/B{table[0]}/P{table[1]}",
            lambda say: measure_prologue(*table, device, runs=runs, say=say),
        ),
        Job("start", lambda say: measure_start(config, start_shape, device, say=say)),
        Job("depth", lambda say: measure_depth(depths, device, say=say)),
        Job("sizes", lambda say: measure_sizes(device, say=say)),
        Job("passes", lambda say: measure_passes(pass_depths, say)),
    ]
    # The four steps of ref24 that the targets name, then the rest of the table.
    return [*steps[:4], *further[:3], *steps[4:6], *further[3:], *steps[6:]]


def carry_out(
    jobs: Sequence[Job],
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
        if job.done_by(record.rows.get(job.name)):
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
