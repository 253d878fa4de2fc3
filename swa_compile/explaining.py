"""`explain`: compile a callable once and say what was hoisted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

from swa_compile.backends import backend
from swa_compile.collecting import collect
from swa_compile.passes import GraphReport


@dataclass(frozen=True)
class Report:
    """What compiling one callable came to.

    Attributes:
        graphs: one report per compiled graph, in order.
        graph_breaks: how often Dynamo had to leave the graph; a hoist cannot reach across one.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: int = 0

    def summary(self) -> str:
        """Readable text: a line on the whole, then each graph."""
        head = f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"
        head += f", {self.graph_breaks} graph break{'s' * (self.graph_breaks != 1)}"
        parts = [f"graph {i}: {graph.summary()}" for i, graph in enumerate(self.graphs)]
        return "\n".join([head, *parts])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "graph_breaks": self.graph_breaks,
            "graphs": [graph.to_dict() for graph in self.graphs],
        }


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compile `fn` with the `swa` backend, run it once on the arguments, and report.

    The run is real: stores write their caches. `fn` may be a module, a function, or the result of
    an earlier `torch.compile`, which is compiled anew.
    """
    fn = getattr(fn, "_orig_mod", fn)
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    breaks = sum(counters["graph_break"].values())
    with collect() as reports:
        # A backend object of its own: Dynamo would otherwise reuse what it compiled before.
        torch.compile(fn, backend=backend())(*args, **kwargs)
    return Report(reports, sum(counters["graph_break"].values()) - breaks)
