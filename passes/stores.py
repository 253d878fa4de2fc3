"""Functionalized KV stores as `index_put`, which Inductor fuses with what makes k and v.

Opaque, a store is one kernel that reads k and v back from memory. As `index_put` on the new value
of the cache it becomes the end of the kernel that computes them (qk-norm, RoPE, quantization), and
Inductor writes it in place. A store keeps its opaque form where the cache argument is a view that
has no form as an index: right, only slower.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.checks import is_float8
from .emit import Emitter, same_size, size_of
from .guards import is_plain
from .lower import as_int64, checked_ids, stopped
from .model_source import module_path, source_line
from .report import Cache
from .row_index import RowIndex
from .schema import (
    FunctionalizedCall,
    functionalized_call,
    history,
    is_store,
    tensors,
)

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass
class Stores:
    """What became of the stores of a graph.

    Attributes:
        found, lowered: how many there were, and how many became `index_put`.
        caches: the graph inputs that they write.
    """

    found: int = 0
    lowered: int = 0
    caches: list[Cache] = field(default_factory=list)


# Which arguments of our stores belong together: cache, rows to write, scale.
_OUR_STORES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "swa::store_kv": (("k_cache", "k", "k_scale"), ("v_cache", "v", "v_scale")),
    "swa::store_latent": (("cache", "latent", "scale"),),
}


def find_stores(graph: Graph) -> list[FunctionalizedCall]:
    """Every functionalized call of a marked store, in graph order."""
    calls = (functionalized_call(node) for node in graph.nodes)
    return [call for call in calls if call is not None and is_store(call)]


def describe_caches(calls: list[FunctionalizedCall]) -> list[Cache]:
    """The graph inputs that `calls` write, each once, in order."""
    found: dict[str, Cache] = {}
    for call in calls:
        for base in call.bases:
            root = history(base)[-1]
            (value,) = tensors(root)
            shape = tuple(
                size if isinstance(size := size_of(dim), int) else str(size) for dim in value.shape
            )
            found.setdefault(
                root.name, Cache(root.name, shape, str(value.dtype).removeprefix("torch."))
            )
    return list(found.values())


def lower_stores(graph: Graph) -> list[list[Node]]:
    """Lower the stores that have a form as an index; returns the `index_put` nodes of each."""
    # All forms are found ahead of the first change: a store that is lowered leaves its base with
    # another layout than the one that torch described the next view by.
    plans = {}
    for call in find_stores(graph):
        plan = _plan(call)
        if plan is not None:
            plans[call.node] = plan
    _drop_mixtures(graph, plans)
    numbers = {call.node: i for i, call in enumerate(find_stores(graph), start=1)}
    return [
        _lower(graph, node, plan, f"store {numbers[node]} of {len(numbers)} in this graph")
        for node, plan in plans.items()
    ]


@dataclass(frozen=True)
class _Write:
    """One cache of one store: which argument, and its index form."""

    cache: str
    rows: str
    scale: str
    index: RowIndex


def _plan(call: FunctionalizedCall) -> list[_Write] | None:
    """How to write each cache of a store; None where it has to stay opaque."""
    plan = []
    for cache, rows, scale in _OUR_STORES.get(call.op._schema.name, ()):
        view = call.written[cache]
        index = RowIndex.of(view) if view is not None else None
        if index is None:
            return None
        plan.append(_Write(cache, rows, scale, index))
    return plan or None


def _drop_mixtures(graph: Graph, plans: dict[Node, list[_Write]]) -> None:
    """Take out stores into a base that opaque writes see, too, unless its layout is plain.

    An opaque write views its base by absolute strides and offset. What `index_put` leaves is
    contiguous from offset 0, so the two only go together where the base always was.
    """
    calls = [call for node in graph.nodes if (call := functionalized_call(node)) is not None]
    roots = {call.node: {history(base)[-1] for base in call.bases} for call in calls}
    changed = True
    while changed:
        opaque = {root for call in calls if call.node not in plans for root in roots[call.node]}
        mixed = {root for root in opaque if not is_plain(root)}
        dropped = [node for node in plans if roots[node] & mixed]
        for node in dropped:
            del plans[node]
        changed = bool(dropped)


def _lower(graph: Graph, node: Node, writes: list[_Write], which: str) -> list[Node]:
    call = functionalized_call(node)
    assert call is not None
    name = call.op._schema.name
    # Ahead of the store: what it reads stands there. All checks come ahead of all writes.
    emit = Emitter(graph, call.node.prev)
    loc: Node = call.args["loc"]
    places = [which, module_path(node), source_line(node)]
    what = f"{name}: argument 'loc' ({', '.join(filter(None, places))})"
    views = [call.written[write.cache] for write in writes]
    rows = [write.index.rows(view, emit) for write, view in zip(writes, views, strict=True) if view]
    # One check for all caches, or one would be written before the ids are found bad for another.
    fewest = reduce(lambda a, b: _smaller(a, b, emit), rows)
    ids = as_int64(checked_ids(loc, fewest, what, emit), emit)
    # "none" goes to the sink row; plain indexing would wrap to the last row instead.
    slot = stopped(emit.call(aten.clamp_min.default, ids, 0, like=loc), ids, fewest, emit)
    new: dict[int, Node] = {}
    puts = []
    for write, view in zip(writes, views, strict=True):
        assert view is not None
        # A second view of one base writes into what the first one left.
        base = new.get(view.base_index, view.base)
        (cache,) = tensors(view.base)
        scale = call.args.get(write.scale)
        values = _as_cache_dtype(call.args[write.rows], scale, cache.dtype, emit)
        index = write.index.tensors(slot, emit)
        new[view.base_index] = emit.call(
            aten.index_put.default, base, index, values, like=call.node
        )
        puts.append(new[view.base_index])
    for position, stored in new.items():
        for item in call.result(position):
            item.replace_all_uses_with(stored)
            graph.erase_node(item)
    for user in list(call.node.users):
        if user.target is operator.getitem and not user.users:  # the None of an op without returns
            graph.erase_node(user)
    if call.node.users:
        # Somebody reads the wrapper's tuple itself: hand them what the store would have given.
        everything = [None] * call.returns + [new.get(i, b) for i, b in enumerate(call.bases)]
        _replace_tuple(call.node, everything)
    graph.erase_node(call.node)
    return puts


def _smaller(a: int | Node, b: int | Node, emit: Emitter) -> int | Node:
    """The smaller of two sizes."""
    if same_size(a, b):
        return a
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return emit.call(torch.sym_min, a, b)


def _replace_tuple(node: Node, items: list[Any]) -> None:
    """Let users of a tuple-valued node take the tuple's items instead."""
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda n: tuple(items) if n is node else n)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: tuple(items) if n is node else n)


def _as_cache_dtype(rows: Node, scale: Any, dtype: torch.dtype, emit: Emitter) -> Node:
    """k or v as the cache holds it: divided by its scale and saturated where it is a float8."""
    (value,) = tensors(rows)
    convert = prims.convert_element_type.default
    if is_float8(dtype) and not (value.dtype is dtype and scale is None):
        rows = emit.call(convert, rows, torch.float32, like=rows)
        if scale is not None:
            rows = emit.call(aten.div.Tensor, rows, scale, like=rows)
        limit = torch.finfo(dtype).max
        rows = emit.call(aten.clamp_min.default, rows, -limit, like=rows)
        rows = emit.call(aten.clamp_max.default, rows, limit, like=rows)
        return emit.call(convert, rows, dtype, like=rows)
    return rows if value.dtype is dtype else emit.call(convert, rows, dtype, like=rows)
