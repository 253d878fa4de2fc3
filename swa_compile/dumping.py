"""What the backends add to a graph's dump: Dynamo's graph, Inductor's code, the page."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from swa_compile.inductor import Generated
from swa_compile.options import Options
from swa_compile.passes import GraphReport
from swa_compile.passes.dump import unified_diff, write_report
from swa_compile.passes.folder import dump_root, new_folder, publish_folder, write_file
from swa_compile.passes.graph_file import read_graph, write_graph
from swa_compile.passes.provenance import provenance
from swa_compile.passes.stages import describe
from swa_compile.passes.tracing import print_graph, trace_stage
from swa_compile.viewer.page import write_page


@dataclass(frozen=True)
class Captured:
    """The graph that Dynamo handed to the backend.

    Attributes:
        text: as FX prints it.
        nodes, stacks: see `swa_compile.passes.stages`.
        names: the user's names of its inputs.
    """

    text: str
    nodes: list[dict[str, Any]]
    stacks: list[str]
    names: list[str]


def capture(gm: GraphModule, names: list[str], options: Options) -> Captured | None:
    """Dynamo's graph for the dump; None where there is none to write, or it cannot be printed.

    To be called ahead of the compilation, which takes the graph over.
    """
    trace_stage("captured", gm.graph)
    if dump_root(options.dump_dir) is None:
        return None
    stacks: dict[str, int] = {}
    try:
        nodes = describe(gm.graph, stacks=stacks)
        return Captured(str(print_graph(gm.graph)), nodes, list(stacks), names)
    except Exception as error:
        warnings.warn(f"stage 'captured' cannot be dumped: {error!r}", stacklevel=2)
        return None


def complete_dump(
    report: GraphReport,
    captured: Captured | None,
    generated: Generated | None,
    options: Options,
) -> GraphReport:
    """Finish the dump that the passes began, or make one for a graph that came from a cache.

    Args:
        report: with the user's names in it.
        captured: Dynamo's graph.
        generated: Inductor's graph and code; None under `swa_eager`, and where Inductor failed.
        options: of the backend.

    Returns:
        The report with the folder's path. A failure is a warning.
    """
    root = dump_root(options.dump_dir)
    if root is None:
        return report
    try:
        if report.dump is not None:
            _complete(Path(report.dump), report, captured, generated, options)
            return report
        if not report.from_cache:  # the passes could not write, and have said so
            return report
        hidden = new_folder(root)
        if hidden is None:
            return report
        finished = report

        def finish(folder: Path) -> None:
            nonlocal finished
            finished = replace(report, dump=str(folder))
            _complete(hidden, finished, captured, generated, options)

        publish_folder(hidden, finish)
        return finished
    except Exception as error:
        warnings.warn(f"no dump: {report.dump or root} was not finished: {error!r}", stacklevel=2)
        return report


def _complete(
    folder: Path,
    report: GraphReport,
    captured: Captured | None,
    generated: Generated | None,
    options: Options,
) -> None:
    if captured is not None:
        write_file(folder / "captured.py", captured.text)
    if generated is not None:
        write_file(folder / "03-inductor.py", generated.code)
    data = read_graph(folder)
    data["provenance"] = data.get("provenance") or provenance()
    data["options"] = {**data.get("options", {}), "backend": _plain(asdict(options))}
    if generated is not None and generated.graph is not None:
        _add_final(folder, data, generated.graph)
    if captured is not None:
        _add_captured(data, captured)
    write_graph(folder, data)
    write_report(folder, report)
    write_page(folder)  # last: a folder with a page is whole


def _add_final(folder: Path, data: dict[str, Any], module: GraphModule) -> None:
    """The graph as Inductor lowers it, behind its own passes; what was prologue is marked so."""
    stages = data["stages"]
    if not stages:
        return
    stacks = {text: i for i, text in enumerate(data.setdefault("stacks", []))}
    prologue = {node["name"] for node in stages[-1]["nodes"] if node.get("prologue")}
    nodes = describe(module.graph, stacks=stacks)
    for node in nodes:
        if node["name"] in prologue:
            node["prologue"] = True
    # Stages whose nodes were left out have their texts.
    names = [*(stage["name"] for stage in stages), *data.get("omitted", [])]
    number = len(names)
    text, before = str(print_graph(module.graph)), f"{number - 1:02d}-{names[-1]}.py"
    file = f"{number:02d}-final.py"
    write_file(folder / file, text)
    if (folder / before).exists():
        changes = unified_diff((folder / before).read_text(), text, before, file)
        write_file(folder / f"diff-{number:02d}.txt", changes)
    data["stacks"] = list(stacks)
    data["stages"] = [*stages, {"name": "final", "file": file, "nodes": nodes}]


def _add_captured(data: dict[str, Any], captured: Captured) -> None:
    table = data.setdefault("stacks", [])
    first = len(table)
    table += captured.stacks
    nodes = [
        {**node, "stack": node["stack"] + first} if "stack" in node else node
        for node in captured.nodes
    ]
    stage = {"name": "captured", "file": "captured.py", "nodes": nodes}
    data["stages"] = [stage, *data["stages"]]
    data["inputs"] = captured.names


def _plain(value: Any, readable: Callable[[Any], str] = repr) -> Any:
    """`value` as JSON holds it; what it cannot hold as its `readable` text."""
    return json.loads(json.dumps(value, default=readable))
