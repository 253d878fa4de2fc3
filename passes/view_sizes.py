"""Where a written view lies in its base, computed from the sizes of the graph's inputs.

With symbolic sizes AOTAutograd takes the place of a written view from the view itself:
`sym_storage_offset(kv[1])`. Inductor answers that with 0 for a view that it has not laid out, and
the write goes to the start of the base. The same number as arithmetic over input sizes
(`s0 * s1 * s2`) is right everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloorDiv

from .emit import Emitter, size_of
from .schema import FunctionalizedCall, ancestors, functionalized_call, is_pure, tensors

aten = torch.ops.aten


def from_input_sizes(graph: Graph) -> int:
    """Rewrite the places of all written views of `graph`; returns how many numbers changed.

    A number with a part that no input gives (a size that is only known once the data is) stays as
    it was; `places_left` finds it.
    """
    source = _InputSizes(graph)
    dropped: list[Node] = []
    for node in list(graph.nodes):
        call = functionalized_call(node)
        if call is None:
            continue
        numbers = [number for number in place_numbers(call) if _read_off_a_view(number)]
        if not numbers:
            continue
        emit = Emitter(graph, node.prev)
        replaced: dict[Node, Any] = {}
        for number in dict.fromkeys(numbers):
            value = source.compute(sympy.sympify(size_of(number)), emit)
            if value is not None:
                replaced[number] = value
        node.kwargs = map_arg(dict(node.kwargs), lambda n: replaced.get(n, n))  # noqa: B023
        dropped += replaced
    _erase_unused(graph, dropped)
    return len(dropped)


def place_numbers(call: FunctionalizedCall) -> list[Node]:
    """The symbolic numbers that say where the written views of `call` lie."""
    found: list[Node] = []
    for view in call.written.values():
        if view is not None:
            map_arg(view.where, found.append)
    return found


def places_left(call: FunctionalizedCall) -> bool:
    """True where a number of `call` is still read off a view."""
    return any(_read_off_a_view(number) for number in place_numbers(call))


def _read_off_a_view(number: Node) -> bool:
    """True where `number` is computed from the layout of a tensor that is no graph input."""
    # Over sizes alone: behind a tensor stands the whole forward.
    sizes = ancestors([number], stop=lambda node: node.op == "placeholder" or bool(tensors(node)))
    return any(
        tensors(arg) and arg.op != "placeholder" for node in sizes for arg in node.all_input_nodes
    )


class _InputSizes:
    """Symbols of a graph by the input that gives them."""

    def __init__(self, graph: Graph) -> None:
        self._source: dict[sympy.Expr, Callable[[Emitter], Node]] = {}
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._source.setdefault(value.node.expr, _always(node))
            elif isinstance(value, torch.Tensor):
                for dim in range(value.dim()):
                    self._offer(value.shape[dim], aten.sym_size.int, node, dim)
                    self._offer(value.stride(dim), aten.sym_stride.int, node, dim)
                self._offer(value.storage_offset(), aten.sym_storage_offset.default, node)

    def _offer(self, size: Any, target: Any, *args: Any) -> None:
        expr = size_of(size)
        if isinstance(expr, sympy.Symbol):
            self._source.setdefault(expr, lambda emit: emit.call(target, *args))

    def compute(self, expr: sympy.Expr, emit: Emitter) -> Any:
        """`expr` as an int or a node; None where it has a part that cannot be had."""
        if expr.is_Integer:
            return int(expr)
        if expr in self._source:
            return self._source[expr](emit)
        parts = [self.compute(part, emit) for part in expr.args]
        if not parts or None in parts:
            return None
        if isinstance(expr, sympy.Add):
            return reduce(lambda a, b: emit.call(operator.add, a, b), parts)
        if isinstance(expr, sympy.Mul):
            return reduce(lambda a, b: emit.call(operator.mul, a, b), parts)
        if isinstance(expr, sympy.Pow) and isinstance(parts[1], int) and parts[1] > 0:
            return reduce(lambda a, b: emit.call(operator.mul, a, b), [parts[0]] * parts[1])
        if isinstance(expr, FloorDiv):
            return emit.call(operator.floordiv, *parts)
        return None


def _always(node: Node) -> Callable[[Emitter], Node]:
    return lambda _: node


def _erase_unused(graph: Graph, nodes: list[Node]) -> None:
    """Erase `nodes` and what they alone were computed from; Inductor would, an interpreter not."""
    computed = ancestors(nodes, stop=lambda node: node.op == "placeholder" or not is_pure(node))
    if computed:
        for node in reversed(graph.nodes):
            if node in computed and not node.users:
                graph.erase_node(node)
