"""The text of a graph at each stage of the passes, in a folder of its own."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.fx import Graph

from .report import GraphReport

ENVIRONMENT_VARIABLE = "SWA_COMPILE_DUMP"


class StageDump:
    """Writes one graph's dump; every method does nothing where no dump was asked for.

    The folder `<dump_dir>/pid-<process>/graph-<nnn>/` holds `00-functional.py`, `01-hoisted.py`,
    `02-lowered.py` (readable FX code with shapes and source lines), `op-counts.txt` (calls of each
    operator per stage) and `report.json`. A dump that fails is a warning, never an error.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._counts: list[tuple[str, Counter[str]]] = []

    @classmethod
    def begin(cls, dump_dir: str | None) -> StageDump:
        """A dump in a new folder below `dump_dir` (or below the environment variable's)."""
        root = dump_root(dump_dir)
        if root is None:
            return cls(None)
        try:
            return cls(new_folder(root))
        except OSError as error:
            warnings.warn(f"no dump: cannot make a folder below {root}: {error}", stacklevel=2)
            return cls(None)

    def stage(self, name: str, graph: Graph) -> None:
        """Write the graph as it is now and count its operators."""
        if self.folder is None:
            return
        self._counts.append((name, op_counts(graph)))
        owner = graph.owning_module
        try:
            module = torch.fx.GraphModule(owner or torch.nn.Module(), graph)
            text = module.print_readable(
                print_output=False, include_stride=True, include_device=True
            )
        except Exception as error:  # whatever the printer met must not stop a compilation
            warnings.warn(f"stage '{name}' cannot be printed: {error}", stacklevel=2)
            return
        finally:
            graph.owning_module = owner  # printing must not take the graph over
        write_file(self.folder / f"{len(self._counts) - 1:02d}-{name}.py", text)

    def finish(self, report: GraphReport) -> GraphReport:
        """Write counts and report; the report with the folder's path in it."""
        if self.folder is None:
            return report
        report = replace(report, dump=str(self.folder))
        write_file(self.folder / "op-counts.txt", _table(self._counts))
        write_report(self.folder, report)
        return report


def dump_root(dump_dir: str | None) -> Path | None:
    """Where dumps go: `dump_dir`, else what the environment variable says, else nowhere."""
    chosen = dump_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else None


def new_folder(root: Path) -> Path:
    """The next free `graph-<nnn>` folder of this process below `root`, made.

    Raises:
        OSError: where it cannot be made.
    """
    parent = root / f"pid-{os.getpid()}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = parent / f"graph-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def write_report(folder: Path, report: GraphReport) -> None:
    """Write `report.json` into `folder`."""
    write_file(folder / "report.json", json.dumps(report.to_dict(), indent=2) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write `text` whole or not at all; a failure is a warning that names the file."""
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        warnings.warn(f"dump file {path} was not written: {error}", stacklevel=2)


def op_counts(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def _table(counts: list[tuple[str, Counter[str]]]) -> str:
    """One line per operator, one column per stage; `*` where the count changes."""
    names = sorted({op for _, count in counts for op in count})
    width = max((len(name) for name in names), default=8)
    lines = ["  ".join([" " * (width + 2), *(f"{stage:>10}" for stage, _ in counts)])]
    for name in names:
        row = [count[name] for _, count in counts]
        mark = "*" if len(set(row)) > 1 else " "
        lines.append("  ".join([f"{mark} {name:<{width}}", *(f"{n:>10}" for n in row)]))
    total = [sum(count.values()) for _, count in counts]
    lines.append("  ".join([f"  {'total':<{width}}", *(f"{n:>10}" for n in total)]))
    return "\n".join(lines) + "\n"
