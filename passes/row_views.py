"""Places seen through views: where in its source an element of a view lies."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .emit import same_size, size_of
from .row_index_math import Index, plus, reshaped
from .schema import tensors

aten = torch.ops.aten

_RESHAPES = (aten.view, aten.reshape, aten.unsqueeze, aten.squeeze)


class NoRowForm(Exception):
    """The value cannot be computed row by row."""


def through_view(node: Node, places: list[Index]) -> tuple[Node, list[Index]]:
    """What the view `node` looks at, and where `places` lie in it.

    Raises:
        NoRowForm: for a view that is not known, or one by sizes that are symbolic.
    """
    source, *args = _all(node)
    if node.target is operator.getitem:
        return _through_split(source, args[0], places)
    (before,), (after,) = tensors(source), tensors(node)
    if before.dtype is not after.dtype:  # the same bits, read otherwise
        raise NoRowForm(node.name)
    packet = getattr(node.target, "overloadpacket", None)
    moved = None
    if packet in _RESHAPES:
        moved = reshaped(places, after.shape, before.shape)
    elif packet is aten.alias:
        moved = places
    elif packet is aten.expand:
        moved = broadcast(source, places)
    elif packet in (aten.permute, aten.transpose, aten.t):
        order = _order(packet, args, before.dim())
        moved = [places[order.index(d)] for d in range(before.dim())]
    elif packet is aten.select:
        moved = _selected(before, args, places)
    elif packet is aten.slice:
        moved = _sliced(before, args, places)
    if moved is None:
        raise NoRowForm(node.name)
    return source, moved


def broadcast(operand: Node, places: list[Index]) -> list[Index]:
    """Places in `operand`, which is broadcast to the shape that `places` belong to."""
    shape = tensors(operand)[0].shape
    last = places[len(places) - len(shape) :]
    return [0 if same_size(size, 1) else place for size, place in zip(shape, last, strict=True)]


def _all(node: Node) -> list[Any]:
    """The arguments of `node`; views are called by position."""
    if node.kwargs:
        raise NoRowForm(node.name)
    return list(node.args)


def _order(packet: Any, args: list[Any], rank: int) -> list[int]:
    """The dimension of the source that each dimension of the view is."""
    if packet is aten.permute:
        return [d % rank for d in args[0]]
    order = list(range(rank))
    if rank > 1:
        a, b = args or (0, 1)
        order[a], order[b] = order[b], order[a]
    return order


def _selected(before: torch.Tensor, args: list[Any], places: list[Index]) -> list[Index] | None:
    dim, index = args[0] % before.dim(), args[1]
    size = size_of(before.shape[dim])
    if not (isinstance(index, int) and isinstance(size, int)):
        return None
    return [*places[:dim], index % size, *places[dim:]]


def _sliced(before: torch.Tensor, args: list[Any], places: list[Index]) -> list[Index] | None:
    defaults: list[Any] = [0, None, None, 1]
    dim, start, _, step = args + defaults[len(args) :]
    size = size_of(before.shape[dim])
    start = start or 0
    if not (isinstance(start, int) and isinstance(size, int) and step == 1):
        return None
    first = min(max(start + size if start < 0 else start, 0), size)
    moved = [*places]
    moved[dim] = plus(places[dim], first)
    return moved


def _through_split(split: Node, item: int, places: list[Index]) -> tuple[Node, list[Index]]:
    """As `through_view`, for an item of what an operator split."""
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise NoRowForm(split.name)
    source, _, *rest = _all(split)
    dim = (rest[0] if rest else 0) % tensors(source)[0].dim()
    start = 0
    for part in tensors(split)[:item]:
        size = size_of(part.shape[dim])
        if not isinstance(size, int):
            raise NoRowForm(split.name)
        start += size
    moved = [*places]
    moved[dim] = plus(places[dim], start)
    return source, moved
