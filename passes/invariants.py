"""Everything else that index inputs alone decide, once, in the prologue.

Casts to int32, page arithmetic, sink clamps, window starts, positions: written in every layer,
the same in every layer. They are merged by value and moved behind the translations.

The cost rule: a value moves only while it is no larger than the largest of its operands (or, made
from nothing like `arange`, than the largest index input). A mask of [tokens, keys] that each layer
makes from short index vectors stays in the layers: it would be kept alive for the whole forward to
save a few integer instructions.

What an input that this forward writes takes part in stays too: nothing is gained by a proof that
has to be redone at every reader.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .emit import Emitter, size_of
from .hoist import Prologue
from .numbering import Numbering
from .origins import Origin, Origins
from .schema import is_pure, is_view, tensors


def hoist_invariants(graph: Graph, prologue: Prologue) -> int:
    """Move and merge index-only computations; returns how many computing nodes went.

    Views and sizes move along with what needs them and are not counted.
    """
    origins, numbering = Origins(graph), Numbering(graph)
    limit = _largest_index_input(graph, origins)
    fixed = _reaching_output(graph)
    emit = prologue.emitter(graph)
    kept: dict[int, Node] = {}
    moved = 0
    for node in list(graph.nodes):
        if node.op == "placeholder":
            kept[numbering[node]] = node
            continue
        here = node in prologue.nodes
        if not here and not _may_move(node, origins, prologue, limit):
            continue
        first = kept.get(numbering[node])
        if first is None or node in fixed or first in fixed:
            if first is None:
                kept[numbering[node]] = node
            if not here:
                _move(node, emit, prologue)
                moved += not is_view(node) and bool(tensors(node))
            continue
        # Same value as one that stands in the prologue already.
        node.replace_all_uses_with(first)
        moved += not here and not is_view(node) and bool(tensors(node))
        if here:
            if emit.cursor is node:
                emit.cursor = node.prev
            prologue.nodes.discard(node)
        graph.erase_node(node)
    prologue.close(emit)
    return moved


def _move(node: Node, emit: Emitter, prologue: Prologue) -> None:
    emit.move(node)
    prologue.nodes.add(node)


def _may_move(node: Node, origins: Origins, prologue: Prologue, limit: int) -> bool:
    if node.op == "get_attr":
        return origins[node] is Origin.INDEX
    if node.op != "call_function" or not is_pure(node) or origins[node] is not Origin.INDEX:
        return False
    if origins.touches_written(node):
        return False
    if not all(arg.op == "placeholder" or arg in prologue.nodes for arg in node.all_input_nodes):
        return False
    operands = [_numel(tensor) for arg in node.all_input_nodes for tensor in tensors(arg)]
    bound = max((size for size in operands if size is not None), default=limit)
    return all((_numel(tensor) or bound + 1) <= bound for tensor in tensors(node))


def _largest_index_input(graph: Graph, origins: Origins) -> int:
    sizes = [
        _numel(tensor) or 0
        for node in graph.nodes
        if node.op == "placeholder" and origins[node] is Origin.INDEX
        for tensor in tensors(node)
    ]
    return max(sizes, default=0)


def _numel(tensor: torch.Tensor) -> int | None:
    """How many elements (at least 1), on this compilation's sizes; None where one is unknown."""
    total = 1
    for extent in tensor.shape:
        size = size_of(extent)
        if isinstance(extent, torch.SymInt) and not isinstance(size, int):
            size = extent.node.hint
        if size is None:
            return None
        total *= max(size, 1)
    return total


def _reaching_output(graph: Graph) -> set[Node]:
    """Nodes that a graph output is, or is a view of: merging those would alias two outputs."""
    found: set[Node] = set()
    todo = [arg for node in graph.nodes if node.op == "output" for arg in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if is_view(node):
            todo += node.all_input_nodes
    return found
