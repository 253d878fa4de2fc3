"""The figures that are asked for, held against what is wanted of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

from swa_compile.bench.record import Record, Row


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, where, its value and target, and whether that is met.

    `met` is None where there is no verdict: the value is missing (`value` says why), there is no
    target for this place, or it is no GPU.
    """

    what: str
    where: str
    value: str
    target: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """ "met", "missed" or nothing."""
        return {True: "met", False: "missed", None: ""}[self.met]


GPU_CLOCK, WALL_CLOCK = "gpu_ms", "wall_ms"


def figures(record: Record) -> list[Figure]:
    """All figures that the rows of `record` give."""
    found: list[Figure] = []
    for row in record.of_kind("steps").values():
        if "variants" in row:
            found += _step_figures(row)
    if not record.about.get("cuda"):  # the targets are those of a GPU
        found = [replace(figure, met=None) for figure in found]
    return found


def median_ms(row: Row, variant: str, clock: str) -> float | None:
    """Median of `variant` in a row of steps, in ms; None where it was not timed."""
    entry = row["variants"].get(variant, {})
    timed = entry.get(clock)
    return None if timed is None else float(timed["median"])


def ours_in(row: Row) -> str:
    """The variant that stands for this package as one graph: its own capture, where it has one."""
    full = row["variants"].get("swa-full", {}).get("status")
    return "swa-full" if full == "ok" else "swa"


# (what, variant, the least ratio at B=64, the least ratio elsewhere)
_RATIOS = (
    ("naive (c) / ours, full graph", "inductor", 1.18, 1.14),
    ("hand-hoisted (e) / ours", "inductor-hoisted", 1.06, 1.06),
    ("plain aten (d) / ours", "inductor-aten", 1.03, 1.03),
    ("eager hand-hoisted (b) / ours", "eager-hoisted", 1.8, 1.8),
)


def _step_figures(row: Row) -> Iterator[Figure]:
    where = f"{row['config']} B={row['batch']} W={row['window']}"
    entries = row["variants"].values()
    clock = GPU_CLOCK if any(GPU_CLOCK in entry for entry in entries) else WALL_CLOCK
    ours = ours_in(row)
    for what, variant, at_64, elsewhere in _RATIOS:
        least = at_64 if row["batch"] == 64 else elsewhere
        yield _ratio(row, where, what, (variant, clock), (ours, clock), least=least)
    yield _ratio(
        row,
        where,
        "stock piecewise (f) / ours piecewise, wall",
        ("inductor-piecewise", WALL_CLOCK),
        ("swa-piecewise", WALL_CLOCK),
        least=1.9,
    )
    yield _ratio(
        row,
        where,
        "ours piecewise / ours full, wall",
        ("swa-piecewise", WALL_CLOCK),
        (ours, WALL_CLOCK),
        most=1.10 if row["batch"] == 64 else None,
    )
    yield from _launches(row, where, ours)
    report = row["variants"].get(ours, {}).get("report", {})
    if report.get("cache_copies") is not None:
        copies = report["cache_copies"]
        yield Figure(
            "cache-sized allocations in compiled code", where, str(copies), "0", copies == 0
        )
    if report.get("mapping_kernels") is not None:
        count, late = report["mapping_kernels"], report.get("mapping_kernels_late")
        value = f"{count}, {late} of them late" if late else str(count)
        yield Figure("translation kernels per forward", where, value, "1", (count, late) == (1, 0))


def _ratio(
    row: Row,
    where: str,
    what: str,
    above: tuple[str, str],
    below: tuple[str, str],
    *,
    least: float | None = None,
    most: float | None = None,
) -> Figure:
    if least is not None:
        target = f">= {least:.2f}"
    else:
        target = f"<= {most:.2f}" if most is not None else "-"
    for variant, clock in (above, below):
        if median_ms(row, variant, clock) is None:
            return Figure(what, where, _why_missing(row, variant), target, None)
    ratios = ratio_spread(row, above, below)
    value = f"{ratios['median']:.3f} ({ratios['q1']:.3f} - {ratios['q3']:.3f})"
    met: bool | None = None
    if least is not None:
        met = ratios["median"] >= least
    elif most is not None:
        met = ratios["median"] <= most
    return Figure(what, where, value, target, met)


def ratio_spread(row: Row, above: tuple[str, str], below: tuple[str, str]) -> dict[str, float]:
    """Ratio of two medians, and the quartiles of the ratios turn by turn.

    Args:
        above, below: (variant, clock).
    """
    samples = [row["variants"][v][clock]["samples"] for v, clock in (above, below)]
    turns = [a / b for a, b in zip(*samples, strict=True)]
    low, _, high = quantiles(turns if len(turns) > 1 else turns * 2, n=4)
    a, b = (median_ms(row, variant, clock) for variant, clock in (above, below))
    assert a is not None and b is not None
    return {"median": a / b, "q1": low, "q3": high}


def _why_missing(row: Row, variant: str) -> str:
    entry = row["variants"].get(variant)
    if entry is None:
        return f"{variant} was not run"
    return f"{variant}: {entry['status']}"


def _launches(row: Row, where: str, ours: str) -> Iterator[Figure]:
    what, target = "launches per layer, ours and (e)", "<= (e)"
    counts: list[Any] = [
        row["variants"].get(variant, {}).get("kernels", {}).get("launches")
        for variant in (ours, "inductor-hoisted")
    ]
    if None in counts:
        return
    per_layer = [count / row["layers"] for count in counts]
    value = f"{per_layer[0]:.1f} and {per_layer[1]:.1f}"
    yield Figure(what, where, value, target, counts[0] <= counts[1])
