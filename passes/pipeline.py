"""The passes in order, as the one object that Inductor (or an engine) is given."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from .. import ops
from ..ops import marks
from .dump import StageDump
from .errors import HoistError, PassError
from .hoist import Hoisted, Prologue, hoist, source_line
from .invariants import hoist_invariants
from .lower import lower
from .materialize import materialize, register_inductor_lowering
from .options import PassOptions
from .report import GraphReport, Refusal, publish, retract
from .schema import is_functionalized_v1
from .stores import describe_caches, find_stores, lower_stores
from .verify import verify, writes_per_input


def pipeline(options: Any = None) -> HoistPipeline:
    """The hoist as a pass for Inductor's `post_grad_custom_pre_pass`.

    Works on stock Inductor, and in engines that own their backend::

        torch.compile(model, options={"post_grad_custom_pre_pass": pipeline()})

    Args:
        options: `PassOptions`, `swa_compile.Options` or a mapping of pass options; None for the
            defaults.

    Raises:
        OptionError: for an unknown option.
    """
    return HoistPipeline(PassOptions.of(options))


class HoistPipeline(CustomGraphPass):
    """See `pipeline`. Holds no state between graphs."""

    def __init__(self, options: PassOptions) -> None:
        self.options = options
        register_inductor_lowering()

    def __call__(self, graph: Graph) -> None:
        """Rewrite the functional, post-AOTAutograd `graph` in place and publish its report.

        Raises:
            HoistError: with `strict`, where a translation stays in the layer code.
            PassError: where the result would break a rule of the passes, or the graph was
                functionalized with version 1 of the wrapper.
        """
        observer = StageDump.begin(self.options.dump_dir)
        report = run(graph, self.options, observer)
        # Inductor gives the pass each subgraph first, as if it were a graph of its own.
        for _, child, _, _ in _subgraphs(graph):
            retract(child)
        if graph.owning_module is not None:
            graph.owning_module.meta["swa_compile_report"] = report
        report = observer.finish(report)
        publish(report)
        if self.options.strict and report.translations_left:
            raise HoistError(_strict_message(report))

    def uuid(self) -> str:
        """Identity for the compile caches: sources of passes and ops, options, op schemas."""
        return _identity(self.options)


def run(graph: Graph, options: PassOptions, observer: StageDump) -> GraphReport:
    """All stages on `graph`; the report of what they did."""
    _refuse_v1(graph)
    observer.stage("functional", graph)
    writes = writes_per_input(graph)
    prologue = Prologue.of(graph)

    hoisted = hoist(graph, prologue)
    observer.stage("hoisted", graph)

    if hoisted.node is not None:
        lower(graph, hoisted.node, prologue)
    stores = find_stores(graph)
    caches = describe_caches(stores)
    lowered = lower_stores(graph) if options.lower_stores else 0
    invariants = hoist_invariants(graph, prologue) if options.hoist_invariants else 0
    materialize(graph, prologue)
    verify(graph, prologue, hoisted.single, writes, (len(stores), lowered))
    observer.stage("lowered", graph)
    return _report(
        graph,
        hoisted,
        GraphReport(
            invariants_hoisted=invariants,
            stores_found=len(stores),
            stores_lowered=lowered,
            caches=caches,
        ),
    )


def _report(graph: Graph, hoisted: Hoisted, own: GraphReport) -> GraphReport:
    """The record of this graph, with what stands in its subgraphs."""
    nodes = (hoisted.node is not None) + len(hoisted.single)
    refused = list(hoisted.refused)
    values = list(hoisted.values)
    found, left = hoisted.found, hoisted.left
    stores_found, stores_lowered = own.stores_found, own.stores_lowered
    invariants = own.invariants_hoisted
    caches = list(own.caches)
    for name, child, times, caller in _subgraphs(graph):
        found += child.translations_found * times
        nodes += child.translation_nodes
        left += child.translation_nodes
        values += child.values
        stores_found += child.stores_found * times
        stores_lowered += child.stores_lowered * times
        invariants += child.invariants_hoisted
        caches += child.caches
        refused += [
            Refusal(
                "IN_SUBGRAPH",
                f"translated inside '{name}', which runs apart from this graph's prologue; "
                "translate ahead of the branch or loop and hand the result in",
                f"{name}.{value.loc}",
                value.source or source_line(caller),
            )
            for value in child.values
        ]
    return GraphReport(
        translations_found=found,
        translations_left=left,
        translation_nodes=nodes,
        values=values,
        refused=refused,
        invariants_hoisted=invariants,
        stores_found=stores_found,
        stores_lowered=stores_lowered,
        caches=caches,
        inputs=_input_places(
            graph, {name for v in values for name in (v.mapping, v.loc)} | {c.name for c in caches}
        ),
    )


def _input_places(graph: Graph, names: set[str]) -> dict[str, int]:
    """Where the inputs `names` stand among the arguments that AOTAutograd was given."""
    places: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in names:
            place = getattr(node.meta.get("desc"), "idx", None)
            if isinstance(place, int):
                places[node.name] = place
    return places


def _subgraphs(graph: Graph) -> list[tuple[str, GraphReport, int, Node]]:
    """(name, report, number of calls, a caller) of each subgraph that the passes went through."""
    module = graph.owning_module
    found: dict[str, tuple[str, GraphReport, int, Node]] = {}
    for node in graph.nodes:
        child = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(child, GraphModule) or not node.users:
            continue
        report = child.meta.get("swa_compile_report")
        if report is not None:
            name = str(node.target)
            times = len(node.users) + (found[name][2] if name in found else 0)
            found[name] = (name, report, times, next(iter(node.users)))
    return list(found.values())


def _refuse_v1(graph: Graph) -> None:
    """Version 1 of the functionalization wrapper clones whole caches and, for stacked ones,
    writes wrong rows in every layer after the first."""
    for node in graph.nodes:
        if is_functionalized_v1(node):
            raise PassError(
                f"'{node.name}' was functionalized with version 1 of torch's wrapper "
                "(enable_auto_functionalized_v2=False), which clones KV caches and can write "
                "wrong rows; leave torch._inductor.config.enable_auto_functionalized_v2 on"
            )


def _strict_message(report: GraphReport) -> str:
    lines = [f"{report.translations_left} translations stay in the layer code (strict=True):"]
    for refusal in report.refused:
        where = f" at {refusal.source}" if refusal.source else ""
        lines.append(f"  {refusal.code}{where}: {refusal.message}")
    return "\n".join(lines)


def _identity(options: PassOptions) -> str:
    """A digest of all that decides what the passes make of a graph."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(ops.__file__).parent):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.name.encode())
            digest.update(source.read_bytes())
    digest.update(torch.__version__.encode())
    digest.update(options.code_key().encode())
    for line in marks.describe():
        digest.update(line.encode())
    return digest.hexdigest()
