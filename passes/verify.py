"""The proof, run after the passes on every graph: nothing lost, nothing left behind, in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ops.checks import dtype_name, shape_name
from .errors import PassError
from .hoist import Prologue
from .model_source import module_path, source_line
from .schema import functionalized_call, is_pure, is_store, tensors, updated_base
from .translations import find_calls


@dataclass(frozen=True)
class Promises:
    """What a graph did before the passes and must do after them.

    Attributes:
        writes: how many writes each graph input receives, by name.
        outputs: how many values the graph returns; None where it has no output node.
    """

    writes: Counter[str]
    outputs: int | None

    @classmethod
    def of(cls, graph: Graph) -> Promises:
        return cls(_writes_per_input(graph), _outputs(graph))


def verify(
    graph: Graph,
    prologue: Prologue,
    refused: list[Node],
    promises: Promises,
    stores: tuple[int, int],
) -> None:
    """Raise `PassError` where the result breaks a rule of the passes.

    Args:
        graph: after all passes.
        prologue: what the passes put at the start.
        refused: translation nodes that may stand outside the prologue.
        promises: of the graph as it came.
        stores: (found, lowered).
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise PassError(f"the passes left a graph that torch refuses: {error}") from error

    _check_prologue(graph, prologue)

    allowed = set(refused)
    for node in find_calls(graph):
        if node not in prologue.nodes and node not in allowed:
            raise PassError(
                f"hoist: translation {_describe(node)} stands outside the prologue and was not "
                "refused"
            )
    check_stores(graph, promises, stores)


def check_stores(graph: Graph, promises: Promises, stores: tuple[int, int]) -> None:
    """Raise `PassError` where `graph` lost a store, a write to an input, or an output.

    Args: as for `verify`.
    """
    found, lowered = stores
    kept = _stores_kept(graph)
    if kept + lowered != found:
        raise PassError(
            f"lower_stores: {found} KV stores came in, {lowered} were lowered and {kept} are left; "
            "switch the pass off with lower_stores=False"
        )
    after = _writes_per_input(graph)
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for name, count in promises.writes.items():
        if after[name] < count:
            raise PassError(
                f"lower_stores: graph input {_describe(inputs[name])} received {count} writes and "
                f"receives {after[name]} now; switch the pass off with lower_stores=False"
            )
    if _outputs(graph) != promises.outputs:
        raise PassError(
            f"lower_stores: the graph returned {promises.outputs} values and returns "
            f"{_outputs(graph)} now; switch the pass off with lower_stores=False"
        )


def _check_prologue(graph: Graph, prologue: Prologue) -> None:
    """Placeholders, then the prologue, then the rest.

    Since a graph is in order, the prologue then reads nothing of the rest.
    """
    inside = True
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node not in prologue.nodes:
            inside = False
        elif not inside:
            raise PassError(f"hoist: prologue node {_describe(node)} stands behind layer code")
        elif node.op != "get_attr" and not is_pure(node):
            raise PassError(f"hoist: prologue node {_describe(node)} has effects or is random")


def _describe(node: Node) -> str:
    """Name, dtype and shape, and where it stands in the model."""
    text = f"'{node.name}'"
    found = tensors(node)
    if len(found) == 1:
        text += f" ({dtype_name(found[0].dtype)} {shape_name(found[0])})"
    place = ", ".join(filter(None, (module_path(node), source_line(node))))
    return f"{text} of {place}" if place else text


def _writes_per_input(graph: Graph) -> Counter[str]:
    """Writes that each graph input receives, counted along the chain of its new values."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
            continue
        found[node.args[0].name] = _writes_behind(node.args[1], node.args[0])
    return found


def _writes_behind(value: object, target: Node) -> int:
    """Writes between the input `target` and its final value, following what is updated."""
    count = 0
    while isinstance(value, Node) and value is not target and value.op == "call_function":
        base = updated_base(value)
        count += base is not None or value.target is torch.ops.aten.index_put.default
        value = base if base is not None else (value.args[0] if value.args else None)
    return count


def _outputs(graph: Graph) -> int | None:
    for node in reversed(graph.nodes):
        if node.op == "output":
            returned = node.args[0]
            return len(returned) if isinstance(returned, (tuple, list)) else 1
    return None


def _stores_kept(graph: Graph) -> int:
    """How many stores the graph still holds in their opaque form."""
    calls = (functionalized_call(node) for node in graph.nodes)
    return sum(call is not None and is_store(call) for call in calls)
