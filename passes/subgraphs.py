"""Translations inside subgraphs, lifted into the graph that calls them.

`torch.compiler.nested_compile_region` compiles a layer once and calls it many times
(`invoke_subgraph`); loops and branches have bodies of their own. A translation in there whose
operands come in from outside is the caller's as well: it is computed ahead of the call and handed
in, and from there on it is an ordinary translation of the caller.

Lifted are the translations of

    invoke_subgraph    all: the body runs whenever the caller does
    while_loop, scan   of loop-invariant operands; also where the loop turns out to run zero times
    cond               that stand in every branch: one of them runs

Everything else stays and is refused as IN_SUBGRAPH.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .emit import Emitter
from .schema import is_pure
from .translations import find_calls

_INVOKE = torch.ops.higher_order.invoke_subgraph
_COND = torch.ops.higher_order.cond
_WHILE = torch.ops.higher_order.while_loop
_SCAN = torch.ops.higher_order.scan


def is_subgraph(graph: Graph) -> bool:
    """True for a graph that another one calls, as far as its inputs tell.

    AOTAutograd describes each input of a graph of its own ("desc"). The inputs of a body are
    copies of nodes that an earlier trace made ("from_node") and carry no such description.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return bool(inputs) and all(
        "from_node" in node.meta and "desc" not in node.meta for node in inputs
    )


def children(graph: Graph) -> dict[str, GraphModule]:
    """The subgraphs that operators of `graph` call, by name, each once."""
    found: dict[str, GraphModule] = {}
    for node in graph.nodes:
        if node.op != "get_attr" or not node.users:
            continue
        child = getattr(graph.owning_module, str(node.target), None)
        if isinstance(child, GraphModule) and all(child is not other for other in found.values()):
            found[str(node.target)] = child
    return found


def callers(graph: Graph, child: GraphModule) -> list[Node]:
    """The nodes of `graph` that call `child`."""
    return [
        user
        for node in graph.nodes
        if node.op == "get_attr" and getattr(graph.owning_module, str(node.target), None) is child
        for user in node.users
    ]


def lift(graph: Graph) -> int:
    """Lift what can be lifted out of the subgraphs of `graph`, innermost first.

    Returns:
        How many inputs the bodies got.
    """
    lifted = sum(lift(child.graph) for child in children(graph).values())
    for call in _calls_of_subgraphs(graph):
        if call.is_first:
            lifted += _lift_from(call, graph)
    return lifted


@dataclass(frozen=True)
class _SubgraphCall:
    """One operator with subgraphs, and all nodes that call the same ones.

    Attributes:
        nodes: the callers; they differ only in their operands.
        bodies: the subgraphs.
        fixed: how many leading inputs of a body change from turn to turn.
        everywhere: a translation is lifted only where every body has it.
        is_first: of several nodes that call the same subgraph, the first.
    """

    nodes: tuple[Node, ...]
    bodies: tuple[GraphModule, ...]
    fixed: int
    everywhere: bool
    is_first: bool

    def operands(self, node: Node) -> tuple[Any, ...]:
        """What `node` hands to the inputs of a body, the changing ones as they start out."""
        if node.target is _INVOKE:
            return tuple(node.args[2:])
        if node.target is _COND:
            return tuple(node.args[3])  # type: ignore[arg-type]
        return tuple(x for group in node.args[len(self.bodies) :] for x in group)  # type: ignore[union-attr]

    def append(self, node: Node, operand: Node) -> None:
        """Hand one more operand to the bodies, as their last input."""

        def longer(args: Any, last: Any) -> Any:
            if node.target is _INVOKE:
                return (*args, last)
            return (*args[:-1], (*args[-1], last))

        node.args = longer(node.args, operand)
        if "eager_input_vals" in node.meta:  # Inductor keeps the operands' strides there
            args, kwargs = node.meta["eager_input_vals"]
            node.meta["eager_input_vals"] = (longer(args, operand.meta["val"]), kwargs)


def _calls_of_subgraphs(graph: Graph) -> Iterator[_SubgraphCall]:
    module = graph.owning_module

    def body(node: Any) -> GraphModule:
        found = getattr(module, str(node.target))
        assert isinstance(found, GraphModule)
        return found

    for node in list(graph.nodes):
        if node.target is _INVOKE:
            child = body(node.args[0])
            nodes = tuple(caller for caller in callers(graph, child) if caller.target is _INVOKE)
            yield _SubgraphCall(nodes, (child,), 0, False, nodes[0] is node)
        elif node.target is _COND:
            yield _SubgraphCall((node,), (body(node.args[1]), body(node.args[2])), 0, True, True)
        elif node.target is _WHILE:
            bodies = (body(node.args[0]), body(node.args[1]))
            yield _SubgraphCall((node,), bodies, len(node.args[2]), False, True)
        elif node.target is _SCAN:
            fixed = len(node.args[1]) + len(node.args[2])
            yield _SubgraphCall((node,), (body(node.args[0]),), fixed, False, True)


def _lift_from(call: _SubgraphCall, graph: Graph) -> int:
    lifted = 0
    found = [_liftable(body.graph, call.fixed) for body in call.bodies]
    keys = dict.fromkeys(key for by_key in found for key in by_key)
    for key in keys:
        if call.everywhere and not all(key in by_key for by_key in found):
            continue
        sample = next(by_key[key][0] for by_key in found if key in by_key)
        copies = sum(len(by_key.get(key, ())) for by_key in found)
        for node in call.nodes:
            operands = call.operands(node)
            emit = Emitter(graph, node.prev)
            # One call of the caller for each that there was, so that the report counts them all.
            copied = [_copy(sample, operands, emit, {}) for _ in range(copies)]
            call.append(node, copied[0])
        for body, by_key in zip(call.bodies, found, strict=True):
            _take_as_input(body, sample, by_key.get(key, []))
        lifted += 1
    return lifted


def _liftable(graph: Graph, fixed: int) -> dict[Hashable, list[Node]]:
    """The translations of `graph` whose operands come in from outside and stay, by expression."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = {node: i for i, node in enumerate(inputs) if i >= fixed}
    found: dict[Hashable, list[Node]] = {}
    for call in find_calls(graph):
        key = _expression(call, places)
        if key is not None:
            found.setdefault(key, []).append(call)
    return found


def _expression(value: Any, places: dict[Node, int]) -> Hashable | None:
    """`value` as an expression over inputs, equal for equal values; None where it is none."""
    if isinstance(value, (list, tuple)):
        items = tuple(_expression(item, places) for item in value)
        return None if None in items else ("items", items)
    if not isinstance(value, Node):
        return ("constant", type(value), repr(value))
    if value in places:
        return ("input", places[value])
    if not is_pure(value):
        return None
    args = _expression([*value.args, *value.kwargs.items()], places)
    return None if args is None else (value.target, args)


def _copy(value: Any, operands: tuple[Any, ...], emit: Emitter, done: dict[Node, Any]) -> Any:
    """`value`, of a body, computed by the caller from the `operands` of its call."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, operands, emit, done) for item in value)
    if not isinstance(value, Node):
        return value
    if value not in done:
        if value.op == "placeholder":
            inputs = [node for node in value.graph.nodes if node.op == "placeholder"]
            done[value] = operands[inputs.index(value)]
        else:
            args = _copy(value.args, operands, emit, done)
            kwargs = {k: _copy(v, operands, emit, done) for k, v in value.kwargs.items()}
            done[value] = emit.call(value.target, *args, like=value, **kwargs)
    return done[value]


def _take_as_input(body: GraphModule, sample: Node, calls: list[Node]) -> None:
    """A further input of `body`, in place of `calls`."""
    graph = body.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        taken = graph.placeholder("translated")
    taken.meta["val"] = sample.meta["val"]
    for key in ("from_node", "mutation_region_id"):
        if key in last.meta:
            taken.meta[key] = last.meta[key]
    for node in calls:
        node.replace_all_uses_with(taken)
        graph.erase_node(node)
    body.recompile()
