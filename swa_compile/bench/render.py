"""Tables of a record: in the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from swa_compile.bench.record import Record, Row
from swa_compile.bench.targets import figures
from swa_compile.bench.variants import VARIANTS


@dataclass(frozen=True)
class Table:
    """One table; `text` of the columns are words and stand left, the others are numbers."""

    title: str
    head: tuple[str, ...]
    text: frozenset[int]
    lines: list[list[str]]


def show(console: Console, record: Record) -> None:
    """Print all tables of `record`."""
    console.print(heading(record), soft_wrap=True)
    for table in tables(record):
        console.print(f"\n[bold]{table.title}[/]", soft_wrap=True)
        printed = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for i, name in enumerate(table.head):
            printed.add_column(name, justify="left" if i in table.text else "right")
        for line in table.lines:
            printed.add_row(*map(_coloured, line))
        console.print(printed)


def markdown(record: Record) -> str:
    """All tables of `record` as Markdown, for docs/benchmarks.md."""
    parts = [heading(record)]
    for table in tables(record):
        rule = ["---" if i in table.text else "---:" for i in range(len(table.head))]
        rows = [list(table.head), rule, *table.lines]
        parts.append(f"### {table.title}")
        parts.append("\n".join("| " + " | ".join(map(_escaped, row)) + " |" for row in rows))
    return "\n\n".join(parts) + "\n"


def heading(record: Record) -> str:
    """One line: card, versions, date."""
    about = record.about
    cuda = f", CUDA {about['cuda']}" if about.get("cuda") else ""
    return (
        f"{about['device']}{cuda}, torch {about['torch']}, triton {about['triton']}, "
        f"swa-compile {about['swa_compile']}, Python {about['python']}; {about['date']}"
    )


def tables(record: Record) -> Iterator[Table]:
    """The tables that the rows of `record` give."""
    found = figures(record)
    if found:
        yield Table(
            "Against the targets",
            ("figure", "where", "measured", "target", ""),
            frozenset({0, 1, 4}),
            [[f.what, f.where, f.value, f.target, f.verdict] for f in found],
        )
    steps = [row for row in record.of_kind("steps").values() if "variants" in row]
    for row in steps:
        head = (
            "variant",
            "GPU, ms (quartiles)",
            "wall, ms (quartiles)",
            "launches",
            "s to prepare",
        )
        yield Table(_title(row), (*head, ""), frozenset({0, 5}), _step_lines(row))
    for row in steps:
        lines = _kernel_lines(row)
        if lines:
            yield Table(
                f"Kernels of one step, {_title(row)}",
                ("kernels", "ours: launches", "µs", "(e): launches", "µs"),
                frozenset({0}),
                lines,
            )
    for row in record.of_kind("stores").values():
        if "ways" in row:
            yield _store_table(row)
    failed = [[name, row["error"]] for name, row in record.rows.items() if "error" in row]
    if failed:
        yield Table("Rows that failed", ("row", "error"), frozenset({0, 1}), failed)
    if steps:
        yield Table(
            "The variants",
            ("variant", "what it is"),
            frozenset({0, 1}),
            [[f"{v.name} ({v.letter})", v.about] for v in VARIANTS.values()],
        )


def _store_table(row: Row) -> Table:
    lines = []
    for name, way in row["ways"].items():
        timed, launches = way["us"], way.get("launches")
        lines.append(
            [
                name,
                f"{timed['median']:.2f} ({timed['q1']:.2f} - {timed['q3']:.2f})",
                "" if launches is None else f"{launches:g}",
            ]
        )
    return Table(
        f"One layer's qk-norm, RoPE and stores alone, B={row['batch']}",
        ("", "µs a call (quartiles)", "launches a call"),
        frozenset({0}),
        lines,
    )


def _title(row: Row) -> str:
    return (
        f"{row['config']}: {row['layers']} layers, B={row['batch']}, W={row['window']}, "
        f"context {row['context']}, {row['dtype']}"
    )


def _step_lines(row: Row) -> list[list[str]]:
    lines = []
    for name, entry in row["variants"].items():
        lines.append(
            [
                f"{name} ({entry['letter']})",
                _timed(entry.get("gpu_ms")),
                _timed(entry.get("wall_ms")),
                str(entry.get("kernels", {}).get("launches", "")),
                str(entry.get("prepare_s", "")),
                "" if entry["status"] == "ok" else f"{entry['status']}: {entry['reason']}",
            ]
        )
    return lines


def _timed(timed: dict[str, Any] | None) -> str:
    if timed is None:
        return ""
    return f"{timed['median']:.3f} ({timed['q1']:.3f} - {timed['q3']:.3f})"


def _kernel_lines(row: Row) -> list[list[str]]:
    profiles: list[Row] = [
        row["variants"].get(variant, {}).get("kernels", {})
        for variant in ("swa", "inductor-hoisted")
    ]
    if not all(profiles):
        return []
    lines = []
    for kind in dict.fromkeys(kind for profile in profiles for kind in profile["kinds"]):
        line = [kind]
        for profile in profiles:
            entry = profile["kinds"].get(kind, {"launches": 0, "us": 0.0})
            line += [str(entry["launches"]), f"{entry['us']:.1f}"]
        lines.append(line)
    total = ["all"]
    for profile in profiles:
        total += [str(profile["launches"]), f"{profile['us']:.1f}"]
    return [*lines, total]


def _coloured(cell: str) -> str:
    colours = {"met": "green", "missed": "red", "wrong": "red", "failed": "red"}
    colour = colours.get(cell.partition(":")[0])
    escaped = cell.replace("[", r"\[")
    return f"[{colour}]{escaped}[/]" if colour else escaped


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
