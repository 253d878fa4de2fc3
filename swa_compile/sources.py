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

_Located = TypeVar("_Located", Value, Refusal)


def call_sources(gm: GraphModule) -> list[str]:
    """ "file:line" of each translation call of a Dynamo graph, in order; not those of bodies."""
    return [
        source_line(node)
        for node in gm.graph.nodes
        if node.op == "call_function" and _translates(node.target)
    ]


def with_sources(report: GraphReport, sources: Sequence[str]) -> GraphReport:
    """`report`, of a graph from a cache, with the lines of this process instead.

    A line is left out where the calls of the two graphs do not correspond one to one: some stand in
    bodies of control flow, or the result of one is not used.
    """
    known = sources if len(sources) == report.translations_found else []

    def here(item: _Located) -> _Located:
        return replace(item, source=known[item.call] if 0 <= item.call < len(known) else "")

    values, refused = map(here, report.values), map(here, report.refused)
    return replace(report, values=list(values), refused=list(refused))


def _translates(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return isinstance(target, torch._ops.OpOverload) and translation_mark(target) is not None
