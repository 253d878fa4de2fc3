"""The one node as aten gathers and integer arithmetic, which Inductor fuses.

The rules of each kind stand in `swa_compile.ops.translate`; this is the same arithmetic without
a branch. Ids that no pool has must not pass: on the CPU `swa::check_ids` raises the same error
as the operator, in the prologue and so before any store of the forward; elsewhere an id below -1
is sent past the end of the tensor, where the bounds check of the generated kernel stops it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..ops.marks import named_call
from .emit import Emitter, same_layout, size_of
from .hoist import Prologue
from .schema import tensors

aten = torch.ops.aten

# Past the end of any tensor.
FAR = 2**62


def lower(graph: Graph, many: Node, prologue: Prologue) -> None:
    """Replace the `swa::translate_many` node `many` by what Inductor can fuse."""
    mappings, locs, kinds, page_sizes = cast("tuple[list[Any], ...]", many.args)
    items = {user.args[1]: user for user in many.users if user.target is operator.getitem}
    # Ahead of the items, whose users (views of them) follow at once.
    emit = Emitter(graph, many, prologue.nodes.add)
    for i, kind in enumerate(kinds):
        mapping, loc, page_size = mappings[i], locs[i], page_sizes[i]
        item = items[i]
        if kind in _RULES and size_of(tensors(mapping)[0].shape[0]) != 0:
            lowered = _RULES[kind](mapping, loc, page_size, emit, item)
        else:  # an operator of somebody else, or nothing to gather from: called as it is, once
            op, args = named_call(kind, mapping, loc, page_size)
            lowered = emit.call(op, *args, like=item)
        if not same_layout(tensors(lowered)[0], tensors(item)[0]):
            # Arithmetic keeps the layout of its operand; a translation is contiguous.
            contiguous = torch.contiguous_format
            lowered = emit.call(aten.clone.default, lowered, memory_format=contiguous, like=item)
        item.replace_all_uses_with(lowered)
        prologue.erase(item)
    prologue.erase(many)


def checked_ids(ids: Node, upper: int | Node, what: str, emit: Emitter) -> Node:
    """`ids` after a check on the CPU that they lie in [-1, upper); elsewhere see `stopped`."""
    if checked_on_the_host(ids):
        return emit.call(torch.ops.swa.check_ids.default, ids, -1, upper, what, like=ids)
    return ids


def checked_on_the_host(ids: Node) -> bool:
    """True where looking at ids costs no synchronization."""
    return tensors(ids)[0].device.type == "cpu"


def stopped(index: Node, ids: Node, upper: int | Node, emit: Emitter) -> Node:
    """Off the CPU, `index` sent past the end of any tensor where `ids` is not in [-1, upper).

    What is computed from the ids is sent, not the ids: a multiple of FAR may overflow.
    """
    if checked_on_the_host(ids):
        return index
    bad = emit.call(aten.lt.Scalar, ids, -1, like=ids)
    if upper != FAR:
        beyond = emit.call(aten.ge.Scalar, ids, upper, like=ids)
        bad = emit.call(aten.logical_or.default, bad, beyond, like=ids)
    return emit.call(aten.where.self, bad, constant(FAR, ids, emit), index, like=ids)


def constant(number: int, like: Node, emit: Emitter) -> Node:
    """A 0-d int64 tensor on the device of `like`."""
    (value,) = tensors(like)
    return emit.call(aten.full.default, [], number, dtype=torch.int64, device=value.device)


def as_int64(ids: Node, emit: Emitter) -> Node:
    """`ids` widened; the same node where they are int64 already."""
    (value,) = tensors(ids)
    if value.dtype is torch.int64:
        return ids
    return emit.call(torch.ops.prims.convert_element_type.default, ids, torch.int64, like=ids)


def size(node: Node, dim: int, emit: Emitter) -> int | Node:
    """Size `dim` of a tensor, as a constant where it is one."""
    extent = tensors(node)[0].shape[dim]
    return extent if isinstance(extent, int) else emit.call(aten.sym_size.int, node, dim)


def _token(mapping: Node, loc: Node, _: object, emit: Emitter, like: Node) -> Node:
    what = "swa::translate_loc: argument 'loc'"
    upper = size(mapping, 0, emit)
    ids = as_int64(checked_ids(loc, upper, what, emit), emit)
    index = stopped(_first(ids, emit), ids, upper, emit)
    return _keep_none(ids, emit.call(aten.index.Tensor, mapping, [index]), emit, like)


def _page_table(mapping: Node, pages: Node, page: int | Node, emit: Emitter, like: Node) -> Node:
    what = "swa::translate_page_table: argument 'page_table'"
    tokens = size(mapping, 0, emit)
    if isinstance(tokens, int) and isinstance(page, int):
        upper: int | Node = -(-tokens // page)
    else:
        rounded = emit.call(operator.add, tokens, emit.call(operator.sub, page, 1))
        upper = emit.call(operator.floordiv, rounded, page)
    ids = as_int64(checked_ids(pages, upper, what, emit), emit)
    first_token = emit.call(aten.mul.Tensor, _first(ids, emit), page, like=like)
    first_token = stopped(first_token, ids, upper, emit)
    swa_token = emit.call(aten.index.Tensor, mapping, [first_token], like=like)
    return _keep_none(ids, _floordiv(swa_token, page, emit), emit, like)


def _paged(table: Node, loc: Node, page: int | Node, emit: Emitter, like: Node) -> Node:
    what = "swa::translate_paged_loc: argument 'loc'"
    ids = as_int64(checked_ids(loc, FAR, what, emit), emit)
    pages = size(table, 0, emit)
    number = _floordiv(ids, page, emit)
    offset = emit.call(aten.remainder.Scalar, ids, page, like=like)
    known = emit.call(
        aten.logical_and.default,
        emit.call(aten.ge.Scalar, ids, 0, like=like),
        emit.call(aten.lt.Scalar, number, pages, like=like),
        like=like,
    )
    zero = constant(0, ids, emit)
    index = emit.call(aten.where.self, known, number, zero, like=like)
    entry = emit.call(aten.index.Tensor, table, [stopped(index, ids, FAR, emit)])
    live = emit.call(
        aten.logical_and.default, known, emit.call(aten.ge.Scalar, entry, 0, like=like), like=like
    )
    slot = emit.call(aten.mul.Tensor, entry, page, like=like)
    slot = emit.call(aten.add.Tensor, slot, offset, like=like)
    return emit.call(aten.where.self, live, slot, zero, like=like)


_RULES: dict[str, Callable[..., Node]] = {
    "swa::translate_loc": _token,
    "swa::translate_page_table": _page_table,
    "swa::translate_paged_loc": _paged,
}


def _first(ids: Node, emit: Emitter) -> Node:
    """`ids` with -1 ("none") read as 0, which every tensor has."""
    return emit.call(aten.clamp_min.default, ids, 0, like=ids)


def _keep_none(ids: Node, translated: Node, emit: Emitter, like: Node) -> Node:
    """-1 where `ids` is -1."""
    none = emit.call(aten.eq.Scalar, ids, -1, like=like)
    return emit.call(aten.where.self, none, constant(-1, ids, emit), translated, like=like)


def _floordiv(x: Node, by: int | Node, emit: Emitter) -> Node:
    return x if by == 1 else emit.call(aten.div.Tensor_mode, x, by, rounding_mode="floor", like=x)
