"""The proof, run after the passes on every graph: nothing lost, nothing left behind, in order."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from .errors import PassError
from .hoist import Prologue
from .schema import functionalized_call, is_store, updated_base
from .translations import find_calls, operands


def writes_per_input(graph: Graph) -> Counter[str]:
    """How many writes each graph input receives, counted along the chain of its new values."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
            continue
        found[node.args[0].name] = _writes_behind(node.args[1], node.args[0])
    return found


def stores_kept(graph: Graph) -> int:
    """How many stores the graph still holds in their opaque form."""
    calls = (functionalized_call(node) for node in graph.nodes)
    return sum(call is not None and is_store(call) for call in calls)


def verify(
    graph: Graph,
    prologue: Prologue,
    refused: list[Node],
    writes_before: Counter[str],
    stores: tuple[int, int],
) -> None:
    """Raise `PassError` where the result breaks a rule of the passes.

    Args:
        graph: after all passes.
        prologue: what the passes put at the start.
        refused: translation nodes that may stand outside the prologue.
        writes_before: `writes_per_input` of the graph as it came.
        stores: (found, lowered).
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise PassError(f"the passes left a graph that torch refuses: {error}") from error

    _check_prologue(graph, prologue)

    allowed = set(refused)
    hoisted = set()
    for node in find_calls(graph):
        if node in prologue.nodes:
            hoisted.add(operands(node)[0])
        elif node not in allowed:
            raise PassError(
                f"translation '{node.name}' stands outside the prologue and was not refused"
            )

    found, lowered = stores
    kept = stores_kept(graph)
    if kept + lowered != found:
        raise PassError(
            f"{found} KV stores came in, {lowered} were lowered and {kept} are left; switch the "
            "lowering off with lower_stores=False"
        )
    after = writes_per_input(graph)
    for name, count in writes_before.items():
        if after[name] < count:
            raise PassError(
                f"graph input '{name}' received {count} writes and receives {after[name]} now; "
                "switch the lowering off with lower_stores=False"
            )


def _check_prologue(graph: Graph, prologue: Prologue) -> None:
    """Placeholders, then the prologue, then the rest; the prologue reads nothing of the rest."""
    inside = True
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node not in prologue.nodes:
            inside = False
        elif not inside:
            raise PassError(f"prologue node '{node.name}' stands behind layer code")


def _writes_behind(value: object, target: Node) -> int:
    """Writes between the input `target` and its final value, following what is updated."""
    count = 0
    while isinstance(value, Node) and value is not target and value.op == "call_function":
        base = updated_base(value)
        count += base is not None or value.target is torch.ops.aten.index_put.default
        value = base if base is not None else (value.args[0] if value.args else None)
    return count
