"""A graph's dump, read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swa_compile.passes.graph_file import read_graph
from swa_compile.passes.reading import read_text
from swa_compile.viewer.records import read_captures, read_report

PAGE = "index.html"


@dataclass
class Dump:
    """What the files of one graph's folder say.

    Attributes:
        folder: where they lie.
        report: `report.json`, or {} where a pass raised.
        graph: `graph.json` (see `swa_compile.passes.stages`); no stages for code from a cache.
        texts: file name -> text of each stage, difference, table and error that is there.
        code: Inductor's, "" where there is none.
        captures: `captures.json`, {} where nothing was to be captured.
        captures_error: why that cannot be read, "" where it can.
    """

    folder: Path
    report: dict[str, Any] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    code: str = ""
    captures: dict[str, Any] = field(default_factory=dict)
    captures_error: str = ""

    @classmethod
    def read(cls, folder: Path) -> Dump:
        """The dump in `folder`.

        Raises:
            OSError, ValueError: where it is none, or the report or the graph in it cannot be read.
        """
        if not is_graph_folder(folder):
            raise ValueError(f"{folder} holds no dump of a graph")
        texts = {
            path.name: _text(path)
            for path in sorted(folder.iterdir())
            if path.suffix in (".py", ".txt") and path.is_file() and not path.name.startswith(".")
        }
        code = texts.pop("03-inductor.py", "")
        dump = cls(folder, read_report(folder), read_graph(folder), texts, code)
        try:
            dump.captures = read_captures(folder)
        except (OSError, ValueError) as error:  # all else can be shown
            dump.captures_error = str(error)
        return dump

    def stage(self, name: str) -> list[dict[str, Any]]:
        """The nodes at stage `name`; none where it is not there."""
        for stage in self.graph["stages"]:
            if stage["name"] == name:
                nodes: list[dict[str, Any]] = stage["nodes"]
                return nodes
        return []

    @property
    def title(self) -> str:
        folder = self.folder
        if folder.name.startswith("."):  # being made; the report has the coming name
            folder = Path(self.report.get("dump") or folder)
        return f"{folder.parent.name}/{folder.name}"


def is_graph_folder(folder: Path) -> bool:
    """True for a folder that a compilation finished or at least reported in."""
    return any((folder / name).is_file() for name in ("report.json", "graph.json", "error.txt"))


def graph_folders(root: Path) -> list[Path]:
    """The graphs' folders at or below `root`, processes and graphs in order.

    Args:
        root: a graph's folder, a process's, or the dump directory.
    """
    if is_graph_folder(root):
        return [root]
    found = [*root.glob("graph-*"), *root.glob("pid-*/graph-*")]
    return sorted((f for f in found if is_graph_folder(f)), key=_order)


def _order(folder: Path) -> tuple[int, float, str, int]:
    """By rank, then by when the process wrote its first graph, then by number."""
    _, _, rank = folder.parent.name.partition("-rank-")
    first = min((f.stat().st_mtime for f in folder.parent.glob("graph-000")), default=0.0)
    number = folder.name.removeprefix("graph-")
    return (
        int(rank) if rank.isdigit() else -1,
        first,
        folder.parent.name,
        int(number) if number.isdigit() else 0,
    )


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        return f"# {path.name} cannot be read: {error}\n"
