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

from torch.fx import Node

from .emit import same_size, size_of
from .row_functions import FLOATS, applied, joined, reduced
from .row_index_math import Index, plus
from .row_views import NoRowForm, broadcast, through_view
from .schema import is_view, tensors

# A row that is longer is better reduced once, by a kernel of its own, than by each block of heads.
LONGEST_ROW = 512

# A value that is seen at many places is computed at each: rotations of rotations multiply.
MOST_STEPS = 300


class TooLong(Exception):
    """The program would not end soon."""


@dataclass
class RowTrace:
    """The steps of one output.

    Attributes:
        inputs: nodes that the program loads from; shared by the outputs of a program.
        keep: true for nodes that are to be loaded, not computed again.
        heads, tokens: how many heads and tokens the output has.
        steps: what was found so far.
        inlined: nodes that the steps compute.
    """

    inputs: list[Node]
    keep: Callable[[Node], bool]
    heads: int = 1
    tokens: Any = None
    steps: list[list[Any]] = field(default_factory=list)
    inlined: set[Node] = field(default_factory=set)
    _known: dict[tuple[Node, str, int | None], int] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)

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
            if place == ["token"] and same_size(extent, self.tokens):
                continue
            if isinstance(place, int):
                if isinstance(size_of(extent), int) and not 0 <= place < size_of(extent):
                    return False
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
        return bool(joined(root) or applied(root) or reduced(root))

    def _trace(self, node: Node, places: list[Index], mask: int | None) -> int:
        inputs = len(self.inputs)
        steps, known, inlined = len(self.steps), dict(self._known), set(self.inlined)
        if self.computes(node):
            try:
                step = self._compute(node, places, mask)
                self.inlined.add(node)
                return step
            except NoRowForm:  # one level further up, then: this value is loaded
                del self.steps[steps:], self.inputs[inputs:]
                self._known, self.inlined = known, inlined
        if len(tensors(node)) != 1:
            raise NoRowForm(node.name)
        return self._add("load", self.input(node), places, mask)

    def _compute(self, node: Node, places: list[Index], mask: int | None) -> int:
        if is_view(node):
            return self.value(*through_view(node, places), mask)
        if (pieces := joined(node)) is not None:
            return self._concatenated(*pieces, node, places, mask)
        if (found := reduced(node)) is not None:
            return self._reduced(found[0], found[1], node, places, mask)
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

    def _reduced(
        self, kind: str, source: Node, node: Node, places: list[Index], mask: int | None
    ) -> int:
        (before,), (after,) = tensors(source), tensors(node)
        size = size_of(before.shape[-1])
        kept = places[:-1] if after.dim() == before.dim() else places
        if not isinstance(size, int) or size > LONGEST_ROW or '"dim"' in json.dumps(kept):
            raise NoRowForm(node.name)
        if mask is not None and self._exists(node, places):
            mask = None  # its row exists as a whole, wherever in the row it is wanted
        if '"dim"' in json.dumps(self._masked_by(mask)):
            raise NoRowForm(node.name)  # a mask over the output's row is none over this one
        value = self.value(source, [*kept, ["dim", size] if size > 1 else 0], mask)
        return self._add(kind, value, size, FLOATS[after.dtype])

    def _masked_by(self, mask: int | None) -> list[Index]:
        """The indices that `mask` depends on."""
        if mask is None:
            return []
        _, index, _, _, outer = self.steps[mask]
        return [index, *self._masked_by(outer)]

    def _concatenated(
        self, pieces: list[Node], dim: int, node: Node, places: list[Index], mask: int | None
    ) -> int:
        (value,) = tensors(node)
        dtype = FLOATS[value.dtype]
        start, found = 0, list[tuple[int, int]]()
        for piece in pieces:
            size = size_of(tensors(piece)[0].shape[dim])
            if not isinstance(size, int):
                raise NoRowForm(node.name)
            here = [*places]
            here[dim] = plus(places[dim], -start)
            if not isinstance(places[dim], int):
                inside = self._add("within", places[dim], start, start + size, mask)
                found.append((inside, self.value(piece, here, inside)))
                last = piece
            elif start <= places[dim] < start + size:
                found.append((-1, self.value(piece, here, mask)))
                last = piece
            start += size
        result = found[-1][1]
        if tensors(last)[0].dtype is not value.dtype:
            result = self._add("apply", "cast", [["step", result]], dtype)
        for inside, step in reversed(found[:-1]):
            arguments = [["step", inside], ["step", step], ["step", result]]
            result = self._add("apply", "where", arguments, dtype)
        return result

    def _add(self, *step: Any) -> int:
        text = json.dumps(step)  # 0.0 and -0.0 are equal, and not the same operand
        if text in self._lines[: len(self.steps)]:
            return self._lines.index(text)
        if len(self.steps) == MOST_STEPS:
            raise TooLong(text)
        self._lines[len(self.steps) :] = [text]
        self.steps.append(list(step))
        return len(self.steps) - 1
