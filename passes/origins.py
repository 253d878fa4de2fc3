"""What each value of a graph is computed from, and hence whether it may move to the prologue.

The classes, from free to fixed:

    INDEX       integer inputs, sizes and constants, and pure integer arithmetic over them
    TABLE       floating-point values that INDEX values alone decide: angles and rotations of
                positions, rows of a float input gathered at positions
    WRITTEN     an index input after the forward wrote it through an operator of its own
    ACTIVATION  anything else that a floating-point tensor takes part in
    IMPURE      random numbers, effects, collectives, operators that nothing is known about

Only INDEX and TABLE values move: they depend on nothing that the layers compute.
"""

from __future__ import annotations

import enum
import operator

import torch
from torch.fx import Graph, Node

from .schema import (
    functionalized_call,
    is_functionalized_v1,
    is_pure,
    tensors,
    updated_base,
    written_inputs,
)

_SIZES = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
    }
)


class Origin(enum.IntEnum):
    """See the module's docstring; a value takes the largest class of its operands."""

    INDEX = 0
    TABLE = 1
    WRITTEN = 2
    ACTIVATION = 3
    IMPURE = 4


class Origins:
    """Classifies the nodes of `graph` as it is now.

    Attributes:
        written: the graph inputs that this forward writes.
    """

    def __init__(self, graph: Graph) -> None:
        self.written = written_inputs(graph)
        self._class: dict[Node, Origin] = {}
        # Which written index inputs a value depends on, as a set shared between nodes.
        self._touched: dict[Node, frozenset[Node]] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._class[node] = self._classify(node)
                self._touched[node] = self._written_roots(node)

    def __getitem__(self, node: Node) -> Origin:
        return self._class[node]

    def touches_written(self, node: Node) -> frozenset[Node]:
        """The written index inputs that `node` is computed from (before or after the write)."""
        return self._touched[node]

    def add(self, node: Node) -> None:
        """Classify a node that a pass made."""
        self._class[node] = self._classify(node)
        self._touched[node] = self._written_roots(node)

    def _classify(self, node: Node) -> Origin:
        if node.op == "placeholder":
            return self._leaf(node)
        if node.op == "get_attr":
            return self._leaf(node) if tensors(node) else Origin.IMPURE
        if node.target in _SIZES:
            # An input's size is known whatever the input holds. The size of something computed
            # can only be had behind its producer, which may be anything.
            source = node.args[0]
            assert isinstance(source, Node)
            return Origin.INDEX if source.op == "placeholder" else self._class[source]
        if node.target is operator.getitem:
            return self._item(node)
        if is_functionalized_v1(node) or not is_pure(node):
            return Origin.IMPURE
        if self._gathers_rows(node):
            return Origin.TABLE
        worst = max((self._class[arg] for arg in node.all_input_nodes), default=Origin.INDEX)
        leaf = self._leaf(node)
        # A float that is computed from no float input is decided by what it is computed from.
        return max(worst, Origin.TABLE if leaf is Origin.ACTIVATION else leaf)

    def _gathers_rows(self, node: Node) -> bool:
        """True for rows of a float input at places that index inputs decide."""
        if node.target is not torch.ops.aten.index.Tensor:
            return False
        table, *places = node.all_input_nodes
        return (
            table.op == "placeholder"
            and self._class[table] is Origin.ACTIVATION
            and table not in self.written
            and all(self._class[place] is Origin.INDEX for place in places)
        )

    def _leaf(self, node: Node) -> Origin:
        """By the dtypes of the value alone."""
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt, torch.SymBool)):
            return Origin.INDEX
        found = tensors(node)
        if not found:
            return Origin.IMPURE
        if any(t.dtype.is_floating_point or t.dtype.is_complex for t in found):
            return Origin.ACTIVATION
        return Origin.INDEX

    def _item(self, node: Node) -> Origin:
        source = node.args[0]
        assert isinstance(source, Node)
        if functionalized_call(source) is None:
            return self._class[source]
        base = updated_base(node)
        return Origin.IMPURE if base is None else max(Origin.WRITTEN, self._class[base])

    def _written_roots(self, node: Node) -> frozenset[Node]:
        if node.op == "placeholder":
            index = self._class[node] is Origin.INDEX
            return frozenset((node,)) if index and node in self.written else frozenset()
        if self._class[node] > Origin.WRITTEN:
            return frozenset()
        base = updated_base(node)
        args = node.all_input_nodes if base is None else [base]
        sets = {self._touched[arg] for arg in args if self._touched.get(arg)}
        return frozenset().union(*sets) if len(sets) > 1 else next(iter(sets), frozenset())
