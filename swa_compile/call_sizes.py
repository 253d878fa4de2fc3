"""How many tokens a call of a compiled graph has, and whether each request has one of them.

Read off Dynamo's graph, which is there also when the code comes from a cache: the sizes of the
arguments of the operators at which a graph is cut, as expressions of the sizes of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from swa_compile.bucket import Sizes

# A memo of so many sizes is emptied: sizes that never repeat are no use in it.
_REMEMBERED = 4096


class CallSizes:
    """A function of the arguments of a compiled graph: the `Sizes` of that call.

    Args:
        gm: from Dynamo.
        names: of its inputs, in the user's code.
        split_ops: operators as "namespace::name"; N is the number of rows of their argument `q`,
            or of their first tensor, and they have one token a request where `cu_seqlens_q` has one
            element more. Where the graph has none of them, N is the length of `out_cache_loc`, and
            nothing keeps it from being captured as a whole.
    """

    def __init__(self, gm: GraphModule, names: Sequence[str], split_ops: Sequence[str]) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        calls = list(_calls(gm, split_ops))
        rows = [(_size(q), _size(cu)) for q, cu in calls]
        self._tokens = rows[0][0] if rows else _length(placeholders, names, "out_cache_loc")
        self._decode = all(q is not None and cu is not None for q, cu in rows)
        self._rows = [(q, cu) for q, cu in rows if q is not None and cu is not None]
        wanted = {
            symbol
            for size in [self._tokens, *(size for pair in self._rows for size in pair)]
            if size is not None
            for symbol in size.free_symbols
        }
        self._known = {s: read for s, read in _sources(placeholders) if s in wanted}
        if not wanted <= self._known.keys():  # a size that data decide
            self._tokens, self._decode = None, False
        self._memo: dict[tuple[int, ...], Sizes] = {}

    def __call__(self, args: Sequence[Any]) -> Sizes:
        values = tuple(int(read(args)) for read in self._known.values())
        sizes = self._memo.get(values)
        if sizes is None:
            if len(self._memo) >= _REMEMBERED:
                self._memo.clear()
            sizes = self._memo[values] = self._evaluate(values)
        return sizes

    def _evaluate(self, values: Sequence[int]) -> Sizes:
        at = dict(zip(self._known, values, strict=True))
        tokens = None if self._tokens is None else int(self._tokens.xreplace(at))
        decode = self._decode and all(
            int(q.xreplace(at)) == int(cu.xreplace(at)) - 1 for q, cu in self._rows
        )
        return Sizes(tokens, decode)


def _calls(gm: GraphModule, split_ops: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """(q, cu_seqlens_q) as the graph knows them, of each call of one of `split_ops`."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            schema = _schema(node)
            if schema is None or schema.name not in split_ops:
                continue
            given = dict(zip([arg.name for arg in schema.arguments], node.args, strict=False))
            given.update(node.kwargs)
            first = next((v for v in given.values() if isinstance(v, Node)), None)
            yield _value(given.get("q", first)), _value(given.get("cu_seqlens_q"))


def _schema(node: Node) -> Any:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _value(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, Node) else argument


def _size(value: Any) -> sympy.Expr | None:
    """Dimension 0 of a tensor."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    return _expression(value.shape[0])


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _length(placeholders: list[Node], names: Sequence[str], wanted: str) -> sympy.Expr | None:
    for node, name in zip(placeholders, names, strict=False):
        if name.rsplit(".", 1)[-1] == wanted:
            return _size(node.meta.get("example_value"))
    return None


def _sources(
    placeholders: list[Node],
) -> Iterator[tuple[sympy.Symbol, Callable[[Sequence[Any]], int]]]:
    """Where the arguments tell the value of each symbol."""
    for place, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            yield value.node.expr, itemgetter(place)
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    yield size.node.expr, partial(_dimension, place, dim)


def _dimension(place: int, dim: int, args: Sequence[Any]) -> int:
    return int(args[place].shape[dim])
