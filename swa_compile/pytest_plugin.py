"""A pytest fixture for people who test that their own models are hoisted.

::

    def test_my_model_translates_once(swa_report):
        torch.compile(model, backend="swa", fullgraph=True)(batch)
        swa_report.assert_hoisted(max_nodes=1)

pytest finds this plugin by its entry point and imports it, and so torch, in every run in an
environment that has the package; `-p no:swa_compile` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swa_compile.collecting import collect
from swa_compile.narrating import narrate_graph
from swa_compile.passes import GraphReport


class SwaReport:
    """The reports of the graphs that a test compiled so far.

    Attributes:
        graphs: one `GraphReport` per graph, in order.
    """

    def __init__(self, graphs: list[GraphReport]) -> None:
        self.graphs = graphs

    def assert_hoisted(self, max_nodes: int = 1, *, stores_lowered: bool = False) -> None:
        """Fail unless every graph with translations has them in at most `max_nodes` nodes.

        Args:
            max_nodes: translation nodes that a graph may have, 1 for the one node. Refused values
                have a node each.
            stores_lowered: also fail where a KV store stayed opaque.

        Raises:
            AssertionError: where that does not hold, or nothing was compiled, or no graph has a
                translation: then the test would say nothing. The text is the report.
        """
        __tracebackhide__ = True
        problems = []
        if not self.graphs:
            problems.append(
                "no graph was compiled here: call the compiled model inside the test (the fixture "
                "starts from empty compile caches of Dynamo)"
            )
        elif not any(graph.translations_found for graph in self.graphs):
            problems.append("no graph has a translation: is the operator marked, and reached?")
        for number, graph in enumerate(self.graphs):
            nodes = graph.translation_nodes
            if nodes > max_nodes:
                problems.append(
                    f"graph {number}: {nodes} translation node{'s' * (nodes != 1)}, wanted at most "
                    f"{max_nodes}"
                )
            opaque = graph.stores_found - graph.stores_lowered
            if stores_lowered and opaque:
                problems.append(
                    f"graph {number}: {opaque} of {graph.stores_found} KV stores stayed opaque"
                )
        if problems:
            raise AssertionError("\n".join([*problems, "", self.text()]).rstrip())

    def text(self) -> str:
        """What `swa-compile explain` would print of these graphs."""
        lines = []
        for number, graph in enumerate(self.graphs):
            lines += [*narrate_graph(graph, f"graph {number}"), ""]
        return "\n".join(lines).rstrip()


@pytest.fixture
def swa_report() -> Iterator[SwaReport]:
    """Reports of what the test compiles with the `swa` backends or `passes.pipeline()`.

    Dynamo forgets earlier compilations first: a function that another test compiled would
    otherwise run without being compiled, and the report would be empty.
    """
    torch._dynamo.reset()
    with collect() as graphs:
        yield SwaReport(graphs)
