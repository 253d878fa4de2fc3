"""Everything else that index inputs alone decide, once, in the prologue.

Casts to int32, page arithmetic, sink clamps, window starts, positions: written in every layer,
the same in every layer. They are merged by value and moved behind the translations. Floating-point
values that index inputs alone decide (the rotations of RoPE, rows of a table gathered at the
positions) go there only if they stand more than once: one is best fused where it is used.

The cost rule: a value moves only while it is no larger than the largest of its operands (or, made
from nothing like `arange`, than the largest index input). A mask of [tokens, keys] that each layer
makes from short index vectors stays in the layers: it would be kept alive for the whole forward to
save a few integer instructions. For floating-point values, whose sines cost more, the bound is
`_TABLE_ROW` times as high: a row of RoPE for each token.

What an input that this forward writes takes part in stays too: nothing is gained by a proof that
has to be redone at every reader.
"""

from __future__ import annotations

from collections import Counter

import sympy
import torch
from torch.fx import Graph, Node

from .emit import Emitter, size_of
from .hoist import Prologue
from .numbering import Numbering
from .origins import Origin, Origins
from .schema import ancestors, is_pure, is_view, reaching_output, tensors

# Elements of a floating-point value per element of its largest operand, and in all.
_TABLE_ROW = 128
_TABLE_LIMIT = 2**20


def hoist_invariants(graph: Graph, prologue: Prologue) -> int:
    """Move and merge index-only computations; returns how many computing nodes went.

    Views and sizes move along with what needs them and are not counted.
    """
    origins, numbering = Origins(graph), Numbering()
    limit = _largest_index_input(graph, origins)
    fixed = reaching_output(graph)
    emit = prologue.emitter(graph)
    kept: dict[int, Node] = {}
    repeated = _repeated_tables(graph, origins, numbering)
    moved = 0
    for node in list(graph.nodes):
        if node.op == "placeholder":
            kept[numbering[node]] = node
            continue
        here = node in prologue.nodes
        if not here and not _may_move(node, origins, prologue, limit, repeated):
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


def _repeated_tables(graph: Graph, origins: Origins, numbering: Numbering) -> set[Node]:
    """TABLE nodes that stand more than once, and the ones that those are computed from."""
    tables = [n for n in graph.nodes if n.op != "output" and origins[n] is Origin.TABLE]
    count = Counter(numbering[node] for node in tables)
    repeated = [node for node in tables if count[numbering[node]] > 1]
    return ancestors(repeated, stop=lambda node: origins[node] is not Origin.TABLE)


def _may_move(
    node: Node, origins: Origins, prologue: Prologue, limit: int, repeated: set[Node]
) -> bool:
    if node.op == "get_attr":
        return origins[node] is Origin.INDEX
    if node.op != "call_function" or not is_pure(node) or origins[node] > Origin.TABLE:
        return False
    if origins[node] is Origin.TABLE and node not in repeated:
        return False
    if origins.touches_written(node):
        return False
    if not all(arg.op == "placeholder" or arg in prologue.nodes for arg in node.all_input_nodes):
        return False
    factor = _TABLE_ROW if origins[node] is Origin.TABLE else 1
    operands = [tensor for arg in node.all_input_nodes for tensor in tensors(arg)]
    return all(_small_enough(tensor, operands, limit, factor) for tensor in tensors(node))


def _small_enough(
    tensor: torch.Tensor, operands: list[torch.Tensor], limit: int, factor: int
) -> bool:
    """The cost rule: see the module's docstring."""
    size = _numel(tensor)
    if size is None:
        # Some size is only known when the forward runs: compare as expressions.
        sizes = [size for operand in operands if (size := _symbolic_numel(operand)) != 0]
        ratios = [_symbolic_numel(tensor) / size for size in sizes]
        return any(ratio.is_number and ratio <= factor for ratio in ratios)
    known = [numel for operand in operands if (numel := _numel(operand)) is not None]
    bound = max(known, default=limit)
    return size <= max(bound, min(bound * factor, _TABLE_LIMIT))


def _largest_index_input(graph: Graph, origins: Origins) -> int:
    sizes = [
        _numel(tensor) or 0
        for node in graph.nodes
        if node.op == "placeholder" and origins[node] is Origin.INDEX
        for tensor in tensors(node)
    ]
    return max(sizes, default=0)


def _symbolic_numel(tensor: torch.Tensor) -> sympy.Expr:
    """How many elements, as an expression over the sizes of the graph."""
    return sympy.Mul(*(size_of(extent) for extent in tensor.shape))


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
