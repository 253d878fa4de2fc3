"""What the passes do inside subgraphs, and how it stands in the caller's report.

A body is visited twice: first on its own, when only its stores can be lowered (Inductor
finishes a body before it looks at the caller), then from the caller, once everything that can be
lifted out of it is gone. What is left is translated once at the body's own start and refused.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, GraphModule

from .guards import refuse_shifted_writes
from .hoist import Prologue, hoist
from .lower import lower
from .materialize import materialize
from .options import PassOptions
from .report import GraphReport, Refusal
from .stores import describe_caches, find_stores, lower_stores
from .subgraphs import callers, children
from .translations import find_calls
from .verify import Promises, check_stores, verify
from .view_sizes import from_input_sizes

_META = "swa_compile_body"


def body_report(graph: Graph, options: PassOptions) -> GraphReport:
    """Lower the stores of a body; a report by which its translations are all left."""
    promises = Promises.of(graph)
    from_input_sizes(graph)
    stores = find_stores(graph)
    lowered = len(lower_stores(graph)) if options.lower_stores else 0
    refuse_shifted_writes(graph)
    check_stores(graph, promises, (len(stores), lowered))
    calls = len(find_calls(graph))
    report = GraphReport(
        translations_found=calls,
        translations_left=calls,
        translation_nodes=calls,
        stores_found=len(stores),
        stores_lowered=lowered,
        caches=describe_caches(stores),
    )
    if graph.owning_module is not None:
        graph.owning_module.meta[_META] = report
    return report


def body_reports(graph: Graph) -> list[GraphReport]:
    """The reports that were published for the bodies of `graph`, at any depth."""
    found = []
    for child in children(graph).values():
        if _META in child.meta:
            found.append(child.meta[_META])
        found += body_reports(child.graph)
    return found


def with_bodies(report: GraphReport, graph: Graph) -> GraphReport:
    """`report`, of a graph out of whose bodies all was lifted that can be, with what is left there.

    Hoists that, too, to each body's own start.
    """
    for name, child in children(graph).items():
        inner = with_bodies(_finish(child), child.graph)
        child.recompile()
        times = len(callers(graph, child))
        refusals = [
            Refusal(
                "IN_SUBGRAPH",
                f"translated inside '{name}', apart from this graph's prologue; translate ahead of "
                "the branch or loop and hand the result in",
                f"{name}.{value.loc}",
                value.source,
            )
            for value in inner.values
        ]
        values = [
            replace(
                value,
                mapping=f"{name}.{value.mapping}",
                loc=f"{name}.{value.loc}",
                code="IN_SUBGRAPH",
                call=-1,
            )
            for value in inner.values
        ]
        report = replace(
            report,
            translations_found=report.translations_found + inner.translations_found * times,
            translations_left=report.translations_left + inner.translation_nodes,
            translation_nodes=report.translation_nodes + inner.translation_nodes,
            values=report.values + values,
            refused=report.refused + refusals,
            stores_found=report.stores_found + inner.stores_found * times,
            stores_lowered=report.stores_lowered + inner.stores_lowered * times,
        )
    return report


def _finish(child: GraphModule) -> GraphReport:
    """Hoist what was not lifted to the start of the body."""
    stores: GraphReport = child.meta.get(_META, GraphReport())
    promises = Promises.of(child.graph)
    prologue = Prologue.of(child.graph)
    hoisted = hoist(child.graph, prologue)
    for node in hoisted.nodes:
        lower(child.graph, node, prologue)
    materialize(child.graph, prologue)
    kept = stores.stores_found - stores.stores_lowered
    verify(child.graph, prologue, hoisted.single, promises, (kept, 0))
    return replace(
        stores,
        translations_found=hoisted.found,
        translation_nodes=len(hoisted.nodes) + len(hoisted.single),
        values=hoisted.values,
    )
