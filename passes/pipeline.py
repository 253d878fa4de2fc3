"""The passes in order, as the one object that Inductor (or an engine) is given."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .. import ops
from ..ops import marks
from .bodies import body_report, body_reports, with_bodies
from .dump import StageDump
from .errors import GraphError, HoistError
from .fuse_rows import fuse_rows
from .guards import refuse_mixed_dtypes, refuse_shifted_writes, refuse_version_1
from .hoist import Prologue, hoist
from .invariants import hoist_invariants
from .lower import lower
from .materialize import materialize, register_inductor_lowering
from .options import PassOptions
from .report import GraphReport, publish, retract
from .schema import collective
from .stores import describe_caches, find_stores, lower_stores
from .subgraphs import is_subgraph, lift
from .verify import Promises, verify
from .view_sizes import from_input_sizes


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
        try:
            self._run(graph)
        except GraphError as error:
            error.inputs = input_places(graph)
            raise

    def _run(self, graph: Graph) -> None:
        refuse_version_1(graph)
        refuse_mixed_dtypes(graph)
        if is_subgraph(graph):
            # Inductor gives the pass each body ahead of the graph that calls it, and only the
            # caller knows where a translation can go. Should nobody call it after all, the
            # report that is published here says that its translations were left.
            publish(body_report(graph, self.options))
            return
        for report in body_reports(graph):
            retract(report)
        observer = StageDump.begin(self.options)
        try:
            report = run(graph, self.options, observer)
        except Exception as error:
            observer.fail(error)
            raise
        report = observer.finish(report)
        publish(report)
        if self.options.strict and report.translations_left:
            raise HoistError(_strict_message(report))

    def uuid(self) -> str:
        """Identity for the compile caches: sources of passes and ops, options, op schemas."""
        return _identity(self.options)


def run(graph: Graph, options: PassOptions, observer: StageDump) -> GraphReport:
    """All stages on `graph` and the bodies that it calls; the report of what they did."""
    observer.stage("functional", graph)
    promises = Promises.of(graph)
    from_input_sizes(graph)
    if lift(graph):
        observer.stage("lifted", graph)
    prologue = Prologue.of(graph)
    hoisted = hoist(graph, prologue)
    observer.hoisted(hoisted)
    observer.stage("hoisted", graph, prologue)

    for node in hoisted.nodes:
        lower(graph, node, prologue)
    stores = find_stores(graph)
    caches = describe_caches(stores)
    lowered = lower_stores(graph) if options.lower_stores else []
    invariants = hoist_invariants(graph, prologue) if options.hoist_invariants else 0
    materialize(graph, prologue)
    refuse_shifted_writes(graph)
    counts = (len(stores), len(lowered))
    verify(graph, prologue, hoisted.single, promises, counts)
    observer.stage("lowered", graph, prologue)
    rows_fused = fuse_rows(graph, prologue, lowered) if options.fuse_rows else 0
    if rows_fused:
        verify(graph, prologue, hoisted.single, promises, counts)
        observer.stage("fused", graph, prologue)

    named = {name for value in hoisted.values for name in (value.mapping, value.loc)}
    named |= {cache.name for cache in caches}
    own = GraphReport(
        translations_found=hoisted.found,
        translations_left=hoisted.left,
        translation_nodes=len(hoisted.nodes) + len(hoisted.single),
        values=hoisted.values,
        refused=hoisted.refused,
        invariants_hoisted=invariants,
        stores_found=len(stores),
        stores_lowered=len(lowered),
        rows_fused=rows_fused,
        caches=caches,
        collectives=[text for node in graph.nodes if (text := collective(node))],
        inputs={name: at for name, at in input_places(graph).items() if name in named},
    )
    return with_bodies(own, graph)


def input_places(graph: Graph) -> dict[str, int]:
    """Where each input of `graph` stands among the arguments that AOTAutograd was given."""
    places = {
        node.name: getattr(node.meta.get("desc"), "idx", None)
        for node in graph.nodes
        if node.op == "placeholder"
    }
    return {name: place for name, place in places.items() if isinstance(place, int)}


def _strict_message(report: GraphReport) -> str:
    left = report.translations_left
    stay = "translation stays" if left == 1 else "translations stay"
    lines = [f"{left} {stay} in the layer code (strict=True):"]
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
