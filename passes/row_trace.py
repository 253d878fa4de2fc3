"""A value of shape [tokens, heads, dim] as steps of a row program.

Walks backwards from the value through what treats rows one by one: arithmetic, casts, reductions
over the last dimension, concatenations, and views of those. Everything else (a projection's
result, a weight, a rotation from the prologue) becomes an input that the program loads from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .emit import size_of
from .row_functions import FLOATS, applied, reduced
from .row_index_math import Index, plus
from .row_views import NoRowForm, broadcast, through_view
from .schema import bind, is_view, tensors

aten = torch.ops.aten

# A row that is longer is better reduced once, by a kernel of its own, than by each block of heads.
LONGEST_ROW = 512


@dataclass
class RowTrace:
    """The steps of one output.

    Attributes:
        inputs: nodes that the program loads from; shared by the outputs of a program.
        keep: true for nodes that are to be loaded, not computed again.
        heads: how many heads the output has.
        steps: what was found so far.
        inlined: nodes that the steps compute.
    """

    inputs: list[Node]
    keep: Callable[[Node], bool]
    heads: int = 1
    steps: list[list[Any]] = field(default_factory=list)
    inlined: set[Node] = field(default_factory=set)
    _known: dict[tuple[Node, str, int | None], int] = field(default_factory=dict)

    def value(self, node: Node, places: list[Index], mask: int | None = None) -> int:
        """The step that holds the element of `node` at `places`.

        Args:
            mask: step that says where the places exist; elsewhere the value is arbitrary.
        """
        if mask is not None and self._exists(node, places):
            mask = None  # the same step serves whoever needs the place without a mask
        key = (node, json.dumps(places), mask)
        if key not in self._known:
            self._known[key] = self._trace(node, places, mask)
        return self._known[key]

    def _exists(self, node: Node, places: list[Index]) -> bool:
        """True where `node` has an element at `places`, wherever the output is."""
        extents = {"head": self.heads}
        found = tensors(node)
        if len(found) != 1:
            return False
        for place, extent in zip(places, found[0].shape, strict=True):
            if isinstance(place, int) or place == ["token"]:
                continue
            most = place[1] if place[0] == "dim" else extents.get(place[0])
            size = size_of(extent)
            if most is None or not isinstance(size, int) or most > size:
                return False
        return True

    def input(self, node: Node) -> int:
        """The number of `node` among the inputs."""
        if node not in self.inputs:
            self.inputs.append(node)
        return self.inputs.index(node)

    def computes(self, node: Node) -> bool:
        """True where the steps can compute `node` (or what it is a view of)."""
        root = node
        while is_view(root):
            root = root.all_input_nodes[0]
        if self.keep(root) or root.op != "call_function":
            return False
        return root.target is aten.cat.default or applied(root) is not None or bool(reduced(root))

    def _trace(self, node: Node, places: list[Index], mask: int | None) -> int:
        inputs = len(self.inputs)
        steps, known = len(self.steps), dict(self._known)
        if self.computes(node):
            try:
                step = self._compute(node, places, mask)
                self.inlined.add(node)
                return step
            except NoRowForm:  # one level further up, then: this value is loaded
                del self.steps[steps:], self.inputs[inputs:]
                self._known = known
        if len(tensors(node)) != 1:
            raise NoRowForm(node.name)
        return self._add("load", self.input(node), places, mask)

    def _compute(self, node: Node, places: list[Index], mask: int | None) -> int:
        if is_view(node):
            return self.value(*through_view(node, places), mask)
        if node.target is aten.cat.default:
            return self._concatenated(node, places, mask)
        if (found := reduced(node)) is not None:
            return self._reduced(found[0], found[1], node, places)
        function = applied(node)
        assert function is not None
        name, operands = function
        (value,) = tensors(node)
        arguments = [
            ["step", self.value(operand, broadcast(operand, places), mask)]
            if isinstance(operand, Node)
            else operand
            for operand in operands
        ]
        return self._add("apply", name, arguments, FLOATS[value.dtype])

    def _reduced(self, kind: str, source: Node, node: Node, places: list[Index]) -> int:
        (before,), (after,) = tensors(source), tensors(node)
        size = size_of(before.shape[-1])
        kept = places[:-1] if after.dim() == before.dim() else places
        if not isinstance(size, int) or size > LONGEST_ROW or '"dim"' in json.dumps(kept):
            raise NoRowForm(node.name)
        # Where this value is wanted matters not: its row exists as a whole or not at all.
        value = self.value(source, [*kept, ["dim", size] if size > 1 else 0], None)
        return self._add(kind, value, size, FLOATS[after.dtype])

    def _concatenated(self, node: Node, places: list[Index], mask: int | None) -> int:
        (value,) = tensors(node)
        given = bind(aten.cat.default, node)
        pieces, dim = given["tensors"], given["dim"] % value.dim()
        start, found = 0, []
        for piece in pieces:
            size = size_of(tensors(piece)[0].shape[dim])
            if not isinstance(size, int):
                raise NoRowForm(node.name)
            here = [*places]
            here[dim] = plus(places[dim], -start)
            if not isinstance(places[dim], int):
                inside = self._add("within", places[dim], start, start + size, mask)
                found.append((inside, self.value(piece, here, inside)))
            elif start <= places[dim] < start + size:
                return self.value(piece, here, mask)
            start += size
        result = found[-1][1]
        for inside, step in reversed(found[:-1]):
            arguments = [["step", inside], ["step", step], ["step", result]]
            result = self._add("apply", "where", arguments, FLOATS[value.dtype])
        return result

    def _add(self, *step: Any) -> int:
        line = list(step)
        if line in self.steps:
            return self.steps.index(line)
        self.steps.append(line)
        return len(self.steps) - 1
