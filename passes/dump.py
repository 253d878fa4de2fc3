"""What the passes leave behind of one graph: its text and its nodes at each stage.

A graph's folder holds, when the passes are through with it,

    00-functional.py   AOTAutograd's graph, as the passes were given it
    01-hoisted.py      all translations in one node ("01-lifted.py" ahead of it, where
                       translations were lifted out of bodies)
    02-lowered.py      that node as gathers, stores as `index_put`: what Inductor is handed
    03-fused.py        on a GPU, what leads up to each store in one call with it
    diff-01.txt, ...   what changed from the stage before
    op-counts.txt      calls of each operator per stage
    graph.json         the nodes of all stages, versions, options and times (see `stages`)
    report.json        the report
    error.txt          where a pass raised: what, and no report

The backends add what they know: `captured.py`, `03-inductor.py`, `index.html`.
"""

from __future__ import annotations

import difflib
import json
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.fx import Graph

from .folder import (
    ENVIRONMENT_VARIABLE,
    discard_folder,
    dump_root,
    new_folder,
    publish_folder,
    write_file,
)
from .graph_file import FORMAT, write_graph
from .hoist import Hoisted, Prologue
from .options import PassOptions
from .provenance import provenance
from .report import GraphReport
from .stages import bodies, describe
from .tracing import print_graph, trace_report, trace_stage

__all__ = ["ENVIRONMENT_VARIABLE", "StageDump", "dump_root", "op_counts", "write_report"]

# A line-by-line comparison of more than this takes longer than the compilation.
_MAX_DIFF_LINES = 40_000


class StageDump:
    """Writes one graph's dump, and shows each stage to torch's own channels.

    Writes nothing where no dump was asked for. A dump that fails is a warning, never an error.
    """

    def __init__(self, hidden: Path | None, options: PassOptions | None = None) -> None:
        self._hidden = hidden
        self._options = options or PassOptions()
        self._counts: list[tuple[str, Counter[str]]] = []
        self._stages: list[dict[str, Any]] = []
        self._stacks: dict[str, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._last_text = ""
        self._since = time.perf_counter()

    @classmethod
    def begin(cls, options: PassOptions) -> StageDump:
        """A dump in a new folder below `options.dump_dir` (or below the environment variable's)."""
        root = dump_root(options.dump_dir)
        if root is None:
            return cls(None)
        try:
            return cls(new_folder(root), options)
        except OSError as error:
            warnings.warn(f"no dump: cannot make a folder below {root}: {error}", stacklevel=2)
            return cls(None)

    def stage(self, name: str, graph: Graph, prologue: Prologue | None = None) -> None:
        """Record the graph as it is now.

        Args:
            name: of the stage; a file's name is made of it.
            graph: as it stands behind the passes so far.
            prologue: what they have put at its start.
        """
        seconds = time.perf_counter() - self._since
        trace_stage(name, graph)
        if self._hidden is not None:
            try:
                self._record(name, graph, prologue, seconds)
            except Exception as error:  # whatever the printer met must not stop a compilation
                warnings.warn(f"stage '{name}' cannot be dumped: {error!r}", stacklevel=2)
        self._since = time.perf_counter()

    def hoisted(self, hoisted: Hoisted) -> None:
        """Record which calls became which value."""
        self._answers = [asdict(answer) for answer in hoisted.answers]

    def finish(self, report: GraphReport) -> GraphReport:
        """Write counts, nodes and report; the report with the folder's path in it."""
        trace_report(report.to_dict(), report.summary())
        if self._hidden is None:
            return report
        finished = [report]

        def named(folder: Path) -> None:
            finished[0] = replace(report, dump=str(folder))
            assert self._hidden is not None
            write_report(self._hidden, finished[0])

        return finished[0] if self._publish(named) else report

    def fail(self, error: Exception) -> None:
        """Keep what there is of a graph on which a pass raised."""
        text = "".join(traceback.format_exception(error))

        def named(folder: Path) -> None:
            assert self._hidden is not None
            write_file(self._hidden / "error.txt", text)

        if self._hidden is not None:
            self._publish(named)

    def _publish(self, named: Any) -> bool:
        hidden = self._hidden
        assert hidden is not None
        try:
            write_file(hidden / "op-counts.txt", _table(self._counts))
            write_graph(hidden, self._data())
            publish_folder(hidden, named)
        except Exception as error:
            warnings.warn(f"the dump in {hidden.parent} was not finished: {error!r}", stacklevel=2)
            discard_folder(hidden)
            return False
        return True

    def _record(self, name: str, graph: Graph, prologue: Prologue | None, seconds: float) -> None:
        assert self._hidden is not None
        number = len(self._counts)
        self._counts.append((name, op_counts(graph)))
        stage = {"name": name, "file": f"{number:02d}-{name}.py", "seconds": round(seconds, 6)}
        self._stages.append({**stage, "nodes": describe(graph, prologue, self._stacks)})
        inside = bodies(graph)
        if inside:
            self._stages[-1]["bodies"] = inside
        text = str(print_graph(graph))
        write_file(self._hidden / f"{number:02d}-{name}.py", text)
        if number:
            before = self._stages[-2]["file"]
            changes = unified_diff(self._last_text, text, before, str(stage["file"]))
            write_file(self._hidden / f"diff-{number:02d}.txt", changes)
        self._last_text = text

    def _data(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "provenance": provenance(),
            "options": {"passes": asdict(self._options)},
            "answers": self._answers,
            "stages": self._stages,
            "stacks": list(self._stacks),
        }


def write_report(folder: Path, report: GraphReport) -> None:
    """Write `report.json` into `folder`."""
    write_file(folder / "report.json", json.dumps(report.to_dict(), indent=2) + "\n")


def unified_diff(before: str, after: str, name_before: str, name_after: str) -> str:
    """What changed between two texts; says so where they are too long to compare."""
    a, b = before.splitlines(), after.splitlines()
    if len(a) + len(b) > _MAX_DIFF_LINES:
        return f"# {len(a)} and {len(b)} lines: too long to compare (bound {_MAX_DIFF_LINES})\n"
    lines = difflib.unified_diff(a, b, name_before, name_after, lineterm="")
    return "\n".join(lines) + "\n"


def op_counts(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def _table(counts: list[tuple[str, Counter[str]]]) -> str:
    """One line per operator, one column per stage, then what changed from the first to the last."""
    names = sorted({op for _, count in counts for op in count})
    width = max((len(name) for name in names), default=8)
    head = [" " * (width + 2), *(f"{stage:>10}" for stage, _ in counts), f"{'change':>10}"]
    lines = ["  ".join(head)]
    for name in names:
        row = [count[name] for _, count in counts]
        mark = "*" if len(set(row)) > 1 else " "
        lines.append("  ".join([f"{mark} {name:<{width}}", *_cells(row)]))
    total = [sum(count.values()) for _, count in counts]
    lines.append("  ".join([f"  {'total':<{width}}", *_cells(total)]))
    return "\n".join(lines) + "\n"


def _cells(row: list[int]) -> list[str]:
    change = row[-1] - row[0] if row else 0
    return [*(f"{n:>10}" for n in row), f"{change:>+10}" if change else f"{'':>10}"]
