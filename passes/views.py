"""Views over an id tensor, and how to put the same views on its translation.

A translation is element-wise over its ids, so it commutes with every view:
`translate(m, loc[a:b]) == translate(m, loc)[a:b]`. A loc is therefore looked at as a root and a
chain of steps over it. Steps come in three kinds:

    same      every element of the root stands in the result: reshape, permute, clone, expand
    part      some elements are left out: slice, select
    widening  int32 ids as int64, which is the same id

A narrowing cast is no step (an id may be lost), nor is anything that computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .emit import Emitter, same_layout, same_size, size_of
from .schema import tensors

aten = torch.ops.aten

_SAME = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.clone.default,
        aten.contiguous.default,
    }
)
_PART = frozenset({aten.slice.Tensor, aten.select.int})

_INDEX_DTYPES = (torch.int32, torch.int64)


def cast_dtype(node: Node) -> torch.dtype | None:
    """The dtype that `node` casts to, or None where it is no plain cast."""
    if node.target is torch.ops.prims.convert_element_type.default:
        dtype = node.args[1]
    elif node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}:
        dtype = node.kwargs.get("dtype")
    else:
        return None
    return dtype if isinstance(dtype, torch.dtype) else None


def widens(node: Node) -> bool:
    """True for a cast that no id can be lost in, between dtypes that ids may have."""
    to = cast_dtype(node)
    if to not in _INDEX_DTYPES:
        return False
    (value,) = tensors(node.args[0])  # type: ignore[arg-type]
    return value.dtype is to or (value.dtype is torch.int32 and to is torch.int64)


def is_same(node: Node) -> bool:
    """True for a step that keeps every element."""
    return node.target in _SAME or widens(node)


def is_part(node: Node) -> bool:
    """True for a step that leaves elements out."""
    return node.target in _PART


def peel(node: Node, *, casts: bool = True) -> tuple[Node, tuple[Node, ...]]:
    """`node` as (root, steps), outermost step last, taking off `same` steps only.

    Without `casts`, widening ones are left: for a translation whose result has the ids' dtype.
    """
    steps: list[Node] = []
    while is_same(node) and isinstance(node.args[0], Node):
        if not casts and cast_dtype(node) is not None:
            break
        steps.append(node)
        node = node.args[0]
    return node, tuple(reversed(steps))


def covers(parent: Node, parts: list[Node]) -> bool:
    """True where the `parts` of `parent` are known to hold every element of it, once or more.

    This is the rule for translating a parent in place of its parts: the same elements are read,
    so it is never more work, and no element is read that the model did not read (a lane beyond
    the live ones may hold anything).
    """
    spans: dict[int, list[tuple[Any, Any]]] = {}
    (value,) = tensors(parent)
    for part in parts:
        found = _span(part, value)
        if found is not None:
            dim, start, end = found
            spans.setdefault(dim, []).append((start, end))
    for dim, intervals in spans.items():
        at: Any = 0
        extent = _extent(parent, value, dim)
        while not same_size(at, extent):
            following = next((span for span in intervals if same_size(span[0], at)), None)
            if following is None:
                break
            intervals.remove(following)  # each part once: an empty or reversed one leads nowhere
            at = following[1]
        else:
            return True
    return False


def replay(steps: tuple[Node, ...], on: Node, like: torch.Tensor, emit: Emitter) -> Node:
    """The chain `steps` on the translated root `on`; contiguous where `like` has that layout."""
    for step in steps:
        if cast_dtype(step) is not None:
            continue  # the translation is int64 already
        # The translated root is contiguous and the ids' root need not be: `view` might refuse.
        target = aten.reshape.default if step.target in _VIEWS else step.target
        on = emit.call(target, on, *step.args[1:], like=step, **step.kwargs)
    (value,) = tensors(on)
    if not same_layout(value, like):
        on = emit.call(aten.clone.default, on, memory_format=torch.contiguous_format)
    return on


_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def _extent(node: Node, value: torch.Tensor, dim: int) -> Any:
    """Size of a dimension: as the model wrote it in a view, which may say more than the symbols."""
    if node.target in _VIEWS:
        written = node.args[1][dim]  # type: ignore[index]
        if isinstance(written, int) and written >= 0:
            return written
    return value.shape[dim]


def _span(part: Node, value: torch.Tensor) -> tuple[int, Any, Any] | None:
    """(dim, start, end) of what `part` keeps of its parent; None where that is not known."""
    if part.target is aten.select.int:
        dim, index = part.args[1:3]
        index = size_of(index)
        if not isinstance(dim, int) or not isinstance(index, int) or index < 0:
            return None
        return dim % value.dim(), index, index + 1
    given = part.args[1:]
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    start = 0 if start is None else start
    if step != 1 or not isinstance(dim, int):
        return None
    size = value.shape[dim]
    start, end = size_of(start), size_of(size if end is None else end)
    if isinstance(end, int) and end >= 2**62:  # "to the end", as Dynamo writes it
        end = size_of(size)
    if (isinstance(start, int) and start < 0) or (isinstance(end, int) and end < 0):
        return None
    return dim % value.dim(), start, end
