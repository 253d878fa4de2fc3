"""Source lines of a report that came out of a compile cache, read from this process's trace.

The cache knows a graph by what it computes. The one that it gives back may have been compiled from
an older state of the file, or from another file: its lines are of no use to whoever reads them now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.fx import GraphModule

from swa_compile.ops.marks import translation_mark
from swa_compile.passes import GraphReport, Refusal
from swa_compile.passes.model_source import source_line
from swa_compile.passes.report import Value
from swa_compile.passes.trace_order import number

_Located = TypeVar("_Located", Value, Refusal)


def call_sources(gm: GraphModule) -> list[str]:
    """ "file:line" of each translation call of a Dynamo graph, in order; not those of bodies.

    Numbers the calls, for the report that is to be kept with the compiled code.
    """
    calls = [
        node for node in gm.graph.nodes if node.op == "call_function" and _translates(node.target)
    ]
    number(calls)
    return [source_line(call) for call in calls]


def with_sources(report: GraphReport, sources: Sequence[str]) -> GraphReport:
    """`report`, of a graph from a cache, with the lines of this process.

    None where the calls of the two graphs do not correspond one to one: some stand in subgraphs,
    or the result of one is not used.
    """
    unknown = any(value.call < 0 for value in report.values)
    known = [] if unknown or len(sources) != report.translations_found else sources

    def here(item: _Located) -> _Located:
        return replace(item, source=known[item.call] if 0 <= item.call < len(known) else "")

    values, refused = map(here, report.values), map(here, report.refused)
    return replace(report, values=list(values), refused=list(refused))


def _translates(target: object) -> bool:
    """Whether `target` may be a translation: which overload a packet calls is not known yet."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_translates(getattr(target, name)) for name in target.overloads())
    return isinstance(target, torch._ops.OpOverload) and translation_mark(target) is not None
