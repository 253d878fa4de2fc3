"""A decode step in every variant: prepared, checked, profiled, and timed in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swa_compile import collect
from swa_compile.bench.checking import Oracle, WrongVariant
from swa_compile.bench.configs import BenchConfig, Shape
from swa_compile.bench.inputs import Setting
from swa_compile.bench.profiling import profile_step
from swa_compile.bench.record import Row
from swa_compile.bench.timing import interleaved, summary
from swa_compile.bench.variants import NotHere, Step, Variant, prepare, require_available
from swa_compile.passes import GraphReport

Say = Callable[[str], None]


def row_name(config: BenchConfig, shape: Shape) -> str:
    """What the row of a step is called in the record."""
    return f"steps/{config.name}/{shape.key()}"


@torch.no_grad()
def measure(
    config: BenchConfig,
    shape: Shape,
    variants: Sequence[Variant],
    device: torch.device,
    *,
    runs: int,
    say: Say = lambda _: None,
) -> Row:
    """One row: sizes, and for each variant its status, check, times, profile and report.

    A variant's "status" is "ok", "no GPU", "not available", "wrong" or "failed"; all but the first
    come with a "reason" and without figures.
    """
    torch._dynamo.reset()
    say("weights and caches")
    setting = Setting.make(config, shape, device)
    say("eager, to compare with")
    oracle = Oracle(setting)
    entries: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for variant in variants:
        say(variant.name)
        entry, step = _prepared(variant, setting, oracle)
        entries[variant.name] = entry
        if step is not None:
            steps[variant.name] = step
    say(f"timing {len(steps)} variants")
    setting.load(0)
    for name, samples in interleaved(steps, runs, device).items():
        for clock, values in samples.items():
            entries[name][f"{clock}_ms"] = summary(values)
    # The graphs and caches of this row must not stand in the next one's way.
    del steps, oracle, setting
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "config": config.name,
        "layers": len(config.layers),
        "batch": shape.batch,
        "window": shape.window,
        "context": shape.context,
        "dtype": str(config.dtype).removeprefix("torch."),
        "runs": runs,
        "variants": entries,
    }


def _prepared(variant: Variant, setting: Setting, oracle: Oracle) -> tuple[Row, Step | None]:
    entry: Row = {"letter": variant.letter, "status": "ok"}
    start = time.perf_counter()
    try:
        require_available(variant, setting.x.device)
        with collect() as reports:
            step = prepare(variant, setting)
        entry["prepare_s"] = round(time.perf_counter() - start, 2)
        checked = oracle.check(step)
        entry["check"] = {
            "output": round(checked.output, 5),
            "rows": round(checked.rows, 5),
            "tolerance": round(checked.tolerance, 5),
        }
        if reports:
            entry["report"] = _told(reports)
        if setting.x.is_cuda:
            entry["kernels"] = profile_step(step)
    except NotHere as error:
        return {**entry, "status": error.kind, "reason": str(error)}, None
    except WrongVariant as error:
        return {**entry, "status": "wrong", "reason": str(error)}, None
    except Exception as error:  # the other variants' figures are worth having
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        reason = f"{type(error).__name__}: {text}"[:400]
        return {**entry, "status": "failed", "reason": reason}, None
    return entry, step


def _told(reports: Sequence[GraphReport]) -> dict[str, Any]:
    """What the reports say of the hoist, summed over the graphs."""
    names = (
        "translations_found",
        "translation_nodes",
        "stores_found",
        "stores_lowered",
        "cache_copies",
        "mapping_kernels",
        "mapping_kernels_late",
        "partitions",
    )
    told: dict[str, Any] = {"graphs": len(reports)}
    for name in names:
        values = [getattr(report, name) for report in reports]
        told[name] = None if None in values else sum(values)
    told["from_cache"] = all(report.from_cache for report in reports)
    return told
