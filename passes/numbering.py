"""Value numbering: which nodes of a functional graph hold the same value.

In a functional graph a value never changes, so two pure calls with equal operands are equal. A
write makes a new node, hence a new number: no alias analysis is needed, and none is done.
Names, pointers, lengths and the order in the source are no evidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node

from .emit import size_of
from .schema import is_pure

# Its argument "what", the beginning of an error's text, is no part of the value.
_CHECK = torch.ops.swa.check_ids.default


class Numbering:
    """Numbers the nodes of a graph; equal numbers mean equal values, dtypes and strides.

    Only pure calls share a number; every other node (inputs, writes, random numbers, operators
    of unknown namespaces) is a value of its own. A node is numbered when it is first asked for,
    with what it is computed from: most of a graph is layer code that nobody asks about.
    """

    def __init__(self) -> None:
        self._number: dict[Node, int] = {}
        self._first: list[Node] = []
        self._by_key: dict[Hashable, int] = {}

    def __getitem__(self, node: Node) -> int:
        todo = [node]  # a stack of our own: a cone may be deeper than Python's
        while todo:
            current = todo[-1]
            if current in self._number:
                todo.pop()
                continue
            size = current.meta.get("val")
            if isinstance(size, torch.SymInt):
                # Sizes of one compilation are equal where their expressions are.
                self._add(current, ("size", size_of(size)))
                todo.pop()
                continue
            pure = is_pure(current)
            waiting = [arg for arg in current.all_input_nodes if arg not in self._number]
            if pure and waiting:
                todo += waiting
                continue
            self._add(current, self._key(current) if pure else None)
            todo.pop()
        return self._number[node]

    def canonical(self, node: Node) -> Node:
        """The node with the value of `node` that was asked for first.

        Asked for in graph order, it stands ahead of every use that was asked for later.
        """
        return self._first[self[node]]

    def _add(self, node: Node, key: Hashable | None) -> None:
        number = self._by_key.get(key) if key is not None else None
        if number is None:
            number = len(self._first)
            self._first.append(node)
            if key is not None:
                self._by_key[key] = number
        self._number[node] = number

    def operand(self, value: Any) -> Hashable:
        """`value`, an argument of some node, as part of a key."""
        if isinstance(value, Node):
            return ("node", self[value])
        if isinstance(value, (list, tuple)):
            return ("list", tuple(self.operand(item) for item in value))
        if isinstance(value, dict):
            return ("dict", tuple((key, self.operand(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", *(self.operand(v) for v in (value.start, value.stop, value.step)))
        # 1, True and 1.0 are equal in Python and different arguments; -0.0 equals 0.0.
        return (type(value), repr(value) if isinstance(value, float) else value)

    def _key(self, node: Node) -> Hashable | None:
        args: Iterable[tuple[str, Any]]
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema.arguments
            given = {arg.name: value for arg, value in zip(schema, node.args, strict=False)}
            given.update(node.kwargs)
            # A default that is spelled out is the same call.
            args = [
                (arg.name, given.get(arg.name, arg.default_value))
                for arg in schema
                if not (arg.name == "what" and node.target is _CHECK)
            ]
        else:
            args = [*enumerate(node.args), *node.kwargs.items()]  # type: ignore[list-item]
        key = (node.target, tuple((name, self.operand(value)) for name, value in args))
        try:
            hash(key)
        except TypeError:
            return None  # an argument of a kind we do not know: never merged
        return key
