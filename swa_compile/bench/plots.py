"""Plots of a record as PNG. matplotlib is optional: `pip install swa-compile[bench]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swa_compile.bench.record import Record, Row
from swa_compile.bench.targets import GPU_CLOCK, WALL_CLOCK


class NoMatplotlib(Exception):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise `NoMatplotlib` where it is not installed; choose its backend for files."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(
            "plots want matplotlib: pip install 'swa-compile[bench]' (or matplotlib)"
        ) from error
    matplotlib.use("Agg")


def plot(record: Record, folder: Path) -> list[Path]:
    """Write one PNG per step, and one of its kernels where they are known; their paths.

    Raises:
        NoMatplotlib: it is not installed.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, row in record.of_kind("steps").items():
        if "variants" not in row:
            continue
        stem = name.replace("/", "-")
        for kind, draw in (("times", _times), ("kernels", _kernels)):
            figure = draw(row, record)
            if figure is not None:
                path = folder / f"{stem}-{kind}.png"
                figure.savefig(path, dpi=120)
                written.append(path)
    return written


def _times(row: Row, record: Record) -> Any:
    """Median step time of each variant, with quartiles."""
    clock = GPU_CLOCK if any(GPU_CLOCK in e for e in row["variants"].values()) else WALL_CLOCK
    shown = {name: e[clock] for name, e in row["variants"].items() if clock in e}
    if not shown:
        return None
    figure, axes = _figure(len(shown))
    names = list(shown)[::-1]
    medians = [shown[name]["median"] for name in names]
    low = [shown[name]["median"] - shown[name]["q1"] for name in names]
    high = [shown[name]["q3"] - shown[name]["median"] for name in names]
    colours = ["#2a6fbb" if name.startswith("swa") else "#9aa5b1" for name in names]
    axes.barh(names, medians, xerr=[low, high], color=colours, error_kw={"elinewidth": 1})
    for i, median in enumerate(medians):
        axes.text(median, i, f"  {median:.3f}", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("ms per step, median and quartiles")
    _title(axes, row, record)
    return figure


def _kernels(row: Row, record: Record) -> Any:
    """Time of one step by kind of kernel, for each variant that was profiled."""
    shown = {n: e["kernels"] for n, e in row["variants"].items() if "kernels" in e}
    if not shown:
        return None
    figure, axes = _figure(len(shown) + 1)
    names = list(shown)[::-1]
    left = [0.0] * len(names)
    for kind in dict.fromkeys(kind for profile in shown.values() for kind in profile["kinds"]):
        widths = [shown[name]["kinds"].get(kind, {"us": 0.0})["us"] for name in names]
        axes.barh(names, widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("µs of kernels in one step")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _title(axes, row, record)
    return figure


def _figure(bars: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.4 * bars), layout="constrained")
    return figure, figure.subplots()


def _title(axes: Any, row: Row, record: Record) -> None:
    axes.set_title(
        f"{row['config']}, B={row['batch']}, W={row['window']}, {row['dtype']} "
        f"({record.about['device']}, torch {record.about['torch']})",
        fontsize=9,
    )
