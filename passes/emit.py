"""Making nodes: with their fake value, their provenance, and in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

import sympy
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg


class Emitter:
    """Inserts calls one after another behind a cursor that moves along.

    Every pass that runs later (and Inductor itself) relies on `meta["val"]`, so each new node is
    run on the fake values of its operands. The stack trace of `like` is kept: a dump or a
    profile then shows the line of the model that the node comes from.
    """

    def __init__(self, graph: Graph, cursor: Node, made: Callable[[Node], None] | None = None):
        self.graph = graph
        self.cursor = cursor
        self._made = made
        # Of the graph's inputs, which lead it, not of the operands: a constant has none.
        inputs = takewhile(lambda node: node.op == "placeholder", graph.nodes)
        values = (node.meta.get("val") for node in inputs)
        self._mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)

    def call(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """A new `call_function` node behind the cursor; the cursor moves onto it."""
        with self.graph.inserting_after(self.cursor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._fake_call(target, args, kwargs)
        if like is not None:
            copy_provenance(node, like)
        self.cursor = node
        if self._made is not None:
            self._made(node)
        return node

    def _fake_call(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = map_arg(args, lambda node: node.meta["val"])
        kwargs = map_arg(kwargs, lambda node: node.meta["val"])
        with self._mode if self._mode is not None else nullcontext():
            if target is auto_functionalized_v2 and _gives_bases_alone(*args, **kwargs):
                # What the wrapper gives without going through all of its dispatch.
                return (
                    None,
                    *(b.new_empty_strided(b.shape, b.stride()) for b in kwargs["_all_bases"]),
                )
            return target(*args, **kwargs)

    def move(self, node: Node) -> None:
        """Take `node` out of its place and put it behind the cursor."""
        self.cursor.append(node)
        self.cursor = node


def _gives_bases_alone(op: Any, **kwargs: Any) -> bool:
    """True where a functionalized call of `op` gives new values of its bases and nothing else."""
    dense = all(base.storage_offset() == 0 for base in kwargs["_all_bases"])
    return dense and not op._schema.returns


def copy_provenance(node: Node, like: Node) -> None:
    """Have `node` come from where `like` comes from; nothing of what `like` is given or gives."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where `a` and `b` are known to have the same sizes and strides."""
    if a.dim() != b.dim():
        return False
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    return all(same_size(x, y) for x, y in pairs)


def same_size(a: Any, b: Any) -> bool:
    """True where two sizes (int, SymInt, or a node that holds one) are known to be equal.

    Never adds a guard: a size that is only equal on this input is not equal.
    """
    a, b = size_of(a), size_of(b)
    return a is not None and b is not None and a == b


def size_of(value: Any) -> Any:
    """A size as an int or a sympy expression, which compare by structure; None for no size."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_number else value
    return value if isinstance(value, int) else None
