"""The figures that are asked for, held against what is wanted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles
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
    for kind, figures_of in _FURTHER.items():
        for row in record.of_kind(kind).values():
            if "error" not in row:
                found += figures_of(row)
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


# What the ratios must reach they must reach on this model; how much of a step of another one can be
# gained depends on its share of GEMMs and attention, so its ratios are shown without a verdict.
_REFERENCE = "ref24"

# (what, variant, the least ratio at B=64, the least ratio elsewhere)
_RATIOS = (
    ("naive (c) / ours, full graph", "inductor", 1.18, 1.14),
    ("hand-hoisted (e) / ours", "inductor-hoisted", 1.06, 1.06),
    ("plain aten (d) / ours", "inductor-aten", 1.03, 1.03),
    ("eager hand-hoisted (b) / ours", "eager-hoisted", 1.8, 1.8),
)


def _step_figures(row: Row) -> Iterator[Figure]:
    where = f"{row['config']} B={row['batch']} W={row['window']}"
    reference = row["config"] == _REFERENCE
    entries = row["variants"].values()
    clock = GPU_CLOCK if any(GPU_CLOCK in entry for entry in entries) else WALL_CLOCK
    ours = ours_in(row)
    for what, variant, at_64, elsewhere in _RATIOS:
        least = at_64 if row["batch"] == 64 else elsewhere
        yield _ratio(
            row,
            where,
            what,
            (variant, clock),
            (ours, clock),
            least=least if reference else None,
        )
    yield _ratio(
        row,
        where,
        "stock piecewise (f) / ours piecewise, wall",
        ("inductor-piecewise", WALL_CLOCK),
        ("swa-piecewise", WALL_CLOCK),
        least=1.9 if reference else None,
    )
    yield _ratio(
        row,
        where,
        "ours piecewise / ours full, wall",
        ("swa-piecewise", WALL_CLOCK),
        (ours, WALL_CLOCK),
        most=1.10 if reference and row["batch"] == 64 else None,
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
    value = _spread(ratios)
    met: bool | None = None
    if least is not None:
        met = ratios["median"] >= least
    elif most is not None:
        met = ratios["median"] <= most
    return Figure(what, where, value, target, met)


def ratio_spread(row: Row, above: tuple[str, str], below: tuple[str, str]) -> dict[str, float]:
    """Ratio of two variants of a row of steps, each given as (variant, clock)."""
    return ratio_of(*(row["variants"][v][clock]["samples"] for v, clock in (above, below)))


def ratio_of(above: list[float], below: list[float]) -> dict[str, float]:
    """Ratio of two medians, and the quartiles of the ratios turn by turn."""
    turns = [a / b for a, b in zip(above, below, strict=True)]
    low, _, high = quantiles(turns if len(turns) > 1 else turns * 2, n=4)
    return {"median": median(above) / median(below), "q1": low, "q3": high}


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


def _spread(ratios: dict[str, float]) -> str:
    return f"{ratios['median']:.3f} ({ratios['q1']:.3f} - {ratios['q3']:.3f})"


# The most that targets.md allows one layer's norms, RoPE and stores alone, in us.
_STORES_US = {64: 3.0, 256: 4.0}


def _store_figures(row: Row) -> Iterator[Figure]:
    where = f"one layer B={row['batch']}"
    ours, most = row["ours_us"], _STORES_US.get(row["batch"])
    target = "-" if most is None else f"<= {most:g} in all"
    value = f"{ours['median']:.2f} ({ours['min']:.2f} - {ours['max']:.2f})"
    what = f"qk-norm, RoPE, stores: us, {row['compilations']} compilations"
    yield Figure(what, where, value, target, None if most is None else ours["max"] <= most)
    launches = [
        e["launches"] for n, e in row["ways"].items() if n[:4] == "ours" and "launches" in e
    ]
    if launches:
        most_launches = max(launches)
        value = f"{most_launches:g}"
        yield Figure("launches of these", where, value, "<= 2", most_launches <= 2)


def _prologue_figures(row: Row) -> Iterator[Figure]:
    large = row["table_mb"] >= 64
    for order, entry in row["tables"].items():
        yield Figure(
            "prologue / copying its bytes",
            f"table of {row['table_mb']:g} MB, {order}",
            _spread(entry["ratio"]),
            "<= 1.3",
            entry["ratio"]["median"] <= 1.3 if large else None,
        )


def _depth_figures(row: Row) -> Iterator[Figure]:
    depths = row["depths"]
    where = f"{', '.join(str(entry['layers']) for entry in depths)} layers"
    counts = [entry["mapping_kernels"] for entry in depths]
    late = sum(entry["mapping_kernels_late"] or 0 for entry in depths)
    yield Figure(
        "translation kernels per forward",
        where,
        ", ".join(map(str, counts)),
        "1",
        set(counts) == {1} and not late,
    )


def _start_figures(row: Row) -> Iterator[Figure]:
    where = f"{row['config']} B={row['batch']}"
    hit = row["warm"]["from_cache"]
    what = "warm start / cold start"
    yield Figure(what, where, _starts(row), "<= 0.25", hit and row["ratio"] <= 0.25)
    yield Figure(f"{what}, plain torch.compile (c)", where, _starts(row["plain"]), "-", None)
    share = row["passes_share"]
    yield Figure("passes / cold compile", where, f"{share:.2%}", "<= 2%", share <= 0.02)


def _starts(row: Row) -> str:
    warm, cold = row["warm"]["seconds"], row["cold"]["seconds"]
    return f"{row['ratio']:.3f} ({warm:.1f} s / {cold:.1f} s)"


# How much more a node may cost in the deepest model than in the shallowest that is measured.
_LINEAR = 1.25


def _pass_figures(row: Row) -> Iterator[Figure]:
    first, last = row["depths"][0], row["depths"][-1]
    growth = last["us_per_node"] / first["us_per_node"]
    yield Figure(
        "passes' time per node, deepest / shallowest",
        f"{first['layers']} to {last['layers']} layers, {last['nodes']} nodes",
        f"{growth:.2f} ({last['us_per_node']:.0f} us / {first['us_per_node']:.0f} us)",
        f"<= {_LINEAR}",
        growth <= _LINEAR if last["nodes"] >= 20_000 else None,
    )


def _size_figures(row: Row) -> Iterator[Figure]:
    counts = row["compilations"]
    value = ", ".join(f"{count} {name}" for name, count in counts.items())
    best = counts.get("mark_sizes")
    yield Figure(
        "compilations",
        f"N in {', '.join(map(str, row['sizes']))}",
        value,
        "<= 2 with mark_sizes",
        isinstance(best, int) and best <= 2,
    )


_FURTHER: dict[str, Callable[[Row], Iterator[Figure]]] = {
    "stores": _store_figures,
    "prologue": _prologue_figures,
    "depth": _depth_figures,
    "start": _start_figures,
    "passes": _pass_figures,
    "sizes": _size_figures,
}
