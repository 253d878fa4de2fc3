"""One kernel between a layer's projection and its attention: norms, RoPE, quantization, stores.

Inductor makes three to five kernels of these few microseconds of work: a reduction ends a kernel,
q, k and v have different shapes, and how it blocks the small ones is decided by timing noise. Each
row `[token, head, :]` of q, k and v is independent of the others, so one kernel can do all of it.

A store that became `index_put` is traced back row by row (`row_trace`), and so is what the reader
of its caches is given besides: q. Where that succeeds the whole is one `swa::run_rows`. Where it
does not, the graph stays as it is: right, only slower.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, Node

from ..ops import row_program
from ..ops.library import has_triton
from .emit import Emitter, same_size, size_of
from .hoist import Prologue
from .lower import size
from .row_functions import FLOATS
from .row_slots import plain_ids
from .row_trace import RowTrace, TooLong
from .row_views import NoRowForm
from .schema import functionalized_call, is_pure, is_view, tensors

aten = torch.ops.aten

# A block holds at least one row.
_WIDEST_ROW = 1024


def fuse_rows(graph: Graph, prologue: Prologue, stores: list[list[Node]]) -> int:
    """Replace what leads up to each of `stores` by one call; returns how many were replaced.

    Args:
        stores: for each lowered store, its `index_put` nodes in order.
    """
    count = 0
    dead: set[Node] = set()
    for puts in stores:
        fusion = _planned(puts, prologue)
        if fusion is not None:
            dead |= fusion.replace(graph)
            count += 1
    for node in reversed(graph.nodes):
        if node in dead and not node.users and is_pure(node):
            dead.update(node.all_input_nodes)
            graph.erase_node(node)
    return count


def worthwhile(node: Node) -> bool:
    """True where one kernel is better than Inductor's: on a GPU that Triton serves."""
    if not has_triton():
        return False
    from ..ops.row_triton import supports

    return all(v.device.type == "cuda" and supports(v.dtype, v.device) for v in tensors(node))


def _planned(puts: list[Node], prologue: Prologue) -> _Fusion | None:
    """How to fuse the store `puts`; None where it has to stay as it is."""
    if not all(map(worthwhile, puts)):
        return None
    queries = _queries(puts, prologue)
    # Queries that depend on something later must not keep the stores from being fused.
    for chosen in (queries, []) if queries else ([],):
        fusion = _Fusion(puts, prologue)
        try:
            for put in puts:
                fusion.add_store(put)
            for query in chosen:
                fusion.add_query(query)
        except (NoRowForm, TooLong):
            continue
        if fusion.inlined and fusion.place() is not None:
            return fusion
    return None


def _queries(puts: list[Node], prologue: Prologue) -> list[Node]:
    """What the readers of the written caches are given that can be computed row by row.

    Where the graph ends ahead of the attention, that is what the graph gives back of the rows that
    the store is computed from.
    """
    (rows,) = tensors(puts[0].args[2])  # type: ignore[arg-type]
    found: dict[Node, None] = {}
    trace = RowTrace([], prologue.nodes.__contains__)
    readers = [user for put in puts for user in put.users if _is_operator(user)]
    for reader in readers or puts[0].graph.find_nodes(op="output"):
        for node in reader.all_input_nodes:
            values = tensors(node)
            if node in puts or len(values) != 1 or values[0].dtype not in FLOATS:
                continue
            (value,) = values
            same = value.dim() in (2, 3) and same_size(value.shape[0], rows.shape[0])
            here = value.device == rows.device and worthwhile(node)
            if same and here and trace.computes(node) and _memory_order(value) is not None:
                found[node] = None
    apart = _seen_apart(puts[0].graph)
    alone = [node for node in found if node not in apart]
    if readers:
        return alone
    stored = set().union(*(_sources(put.args[2], prologue) for put in puts))
    return [node for node in alone if not stored.isdisjoint(_sources(node, prologue))]


def _seen_apart(graph: Graph) -> set[Node]:
    """Views that the graph gives back beside something else of the same memory.

    A buffer of its own for such a view would part two outputs that eager code gives as one.
    """
    returned: dict[Node, set[Node]] = {}  # by what owns the memory
    through: dict[Node, set[Node]] = {}  # by what is looked at on the way
    for output in graph.find_nodes(op="output"):
        for node in output.all_input_nodes:
            owner = _viewed(node)
            returned.setdefault(owner, set()).add(node)
            at = node
            while at is not owner:
                through.setdefault(at, set()).add(node)
                at = at.all_input_nodes[0]
    return {node for node, found in through.items() if found != returned[_viewed(node)]}


def _sources(value: Any, prologue: Prologue) -> set[Node]:
    """What a layer computes `value` from row by row, each by the node that owns its memory.

    Inputs of the graph count only where nothing else is loaded: all layers may read them. Empty
    where it cannot be computed so.
    """
    (rows,) = tensors(value)
    try:
        heads, _ = _extent(rows)
        trace = RowTrace([], prologue.nodes.__contains__, heads, rows.shape[0])
        trace.value(value, _places(rows))
    except (NoRowForm, TooLong):
        return set()
    loaded = {
        _viewed(node)
        for node in trace.inputs
        if node not in prologue.nodes
        and any(same_size(extent, rows.shape[0]) for extent in tensors(node)[0].shape)
    }
    return {node for node in loaded if node.op != "placeholder"} or loaded


def _is_operator(node: Node) -> bool:
    """True for a call of somebody's operator, as attention is."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


@dataclass
class _Fusion:
    """One call of `swa::run_rows`, as it is planned.

    Attributes:
        puts: the index_put nodes of one store, in order.
        bases: the tensors that they write, each once.
        queries: values that are computed along.
        inputs, outputs: of the program.
        slots: for each of `puts`, where its rows go; ids, where the program takes these.
        inlined: nodes that the program computes.
    """

    puts: list[Node]
    prologue: Prologue
    bases: list[Node] = field(default_factory=list)
    queries: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    slots: list[Node] = field(default_factory=list)
    inlined: set[Node] = field(default_factory=set)

    def add_store(self, put: Node) -> None:
        """Raises NoRowForm where the store is not written row by row."""
        base, index, value = put.args[:3]
        assert isinstance(base, Node) and isinstance(value, Node)
        if base in self.puts:  # another part of the same tensor
            target = self.outputs[self.puts.index(base)]["target"]
        else:
            target = len(self.bases)
            self.bases.append(base)
        (stored,), (rows,) = tensors(base), tensors(value)
        _extent(rows)
        slots, place = None, []
        free = _places(rows)[1:]
        for at in [*index, *[None] * (stored.dim() - len(index))]:  # type: ignore[misc, arg-type]
            if at is None:
                place.append(free.pop(0))
            elif at.target is aten.full.default:
                place.append(at.args[1])
            elif slots is None and tensors(at)[0].dim() == 1:
                slots = at
                place.append(["slot"])
            else:
                raise NoRowForm(put.name)
        if slots is None or free or not self._apart(target, place):
            raise NoRowForm(put.name)
        ids = plain_ids(slots, self.puts, self.prologue)
        self.slots.append(slots if ids is None else ids)
        self._add(value, target, place, self.slots[-1], sink=None if ids is None else 0)

    def _apart(self, target: int, place: list[Any]) -> bool:
        """True where no other output writes what `place` names: outputs have no order."""
        return all(
            any(
                isinstance(a, int) and isinstance(b, int) and a != b
                for a, b in zip(place, output["place"], strict=True)
            )
            for output in self.outputs
            if output["target"] == target
        )

    def add_query(self, query: Node) -> None:
        """Raises NoRowForm where the value is not computed row by row."""
        (value,) = tensors(query)
        order = _memory_order(value)
        assert order is not None
        self.queries.append(query)
        target = len(self.bases) + len(self.queries) - 1
        self._add(query, target, [_places(value)[d] for d in order])

    def _add(
        self,
        node: Node,
        target: int,
        place: list[Any],
        slots: Node | None = None,
        sink: int | None = None,
    ) -> None:
        (value,) = tensors(node)
        heads, dim = _extent(value)
        keep = self.prologue.nodes.__contains__
        trace = RowTrace(self.inputs, keep, heads, value.shape[0])
        step = trace.value(node, _places(value))
        self.inlined |= trace.inlined
        self.outputs.append(
            {
                "heads": heads,
                "dim": dim,
                "target": target,
                "place": place,
                "slots": None if slots is None else trace.input(slots),
                "sink": sink,
                "value": step,
                "steps": trace.steps,
            }
        )

    def place(self) -> Node | None:
        """The node behind which the call can stand: all that it needs is there, and nobody has
        needed its results yet. None where there is no such place."""
        ours = {*self.puts, *self.queries}
        # Rows would be read while they are written; or, as they were ahead of an earlier store, so
        # late that the whole cache would have to be copied.
        sources = set(map(_viewed, self.inputs))
        if sources & ours or any(map(_is_written, sources)):
            return None
        first = min(
            (user for node in ours for user in node.users if user not in ours), default=None
        )
        needed = max([*self.inputs, *self.bases, *self.slots, self.puts[-1]])
        return needed if first is None or needed < first else None

    def replace(self, graph: Graph) -> set[Node]:
        """Put the call into the graph; returns nodes that may be without users now."""
        at = self.place()
        assert at is not None
        emit = Emitter(graph, at)
        tokens = size(self.slots[0], 0, emit)
        written = [*self.bases, *(self._buffer(query, tokens, emit) for query in self.queries)]
        call = emit.call(
            auto_functionalized_v2,
            torch.ops.swa.run_rows.default,
            inputs=self.inputs,
            program=row_program.write(self.outputs),
            tokens=tokens,
            _written_length=len(written),
            **{f"_written_{i}_base_index": i for i in range(len(written))},
            **{f"_written_{i}_alias": True for i in range(len(written))},
            _all_bases=written,
            like=self.puts[0],
        )
        new = [emit.call(operator.getitem, call, 1 + i, like=call) for i in range(len(written))]
        for put, output in zip(self.puts, self.outputs, strict=False):
            put.replace_all_uses_with(
                new[output["target"]], delete_user_cb=lambda user: user not in self.puts
            )
        for query, result in zip(self.queries, new[len(self.bases) :], strict=True):
            order = _memory_order(tensors(query)[0])
            assert order is not None
            if order != sorted(order):
                back = [order.index(d) for d in range(len(order))]
                result = emit.call(aten.permute.default, result, back, like=query)
            query.replace_all_uses_with(result)
        return {*self.inlined, *self.puts, *self.queries}

    def _buffer(self, query: Node, tokens: int | Node, emit: Emitter) -> Node:
        """Memory for `query`, its dimensions in the order in which they lie in memory."""
        (value,) = tensors(query)
        order = _memory_order(value)
        assert order is not None
        sizes = [tokens, *value.shape[1:]]
        return emit.call(
            aten.empty.memory_format,
            [sizes[d] for d in order],
            dtype=value.dtype,
            device=value.device,
            like=query,
        )


def _is_written(node: Node) -> bool:
    """True where a store takes `node` and gives it a new value."""
    for user in node.users:
        call = functionalized_call(user)
        if call is not None and node in call.bases:
            return True
        if user.target is aten.index_put.default and user.args[0] is node:
            return True
    return False


def _viewed(node: Node) -> Node:
    """What `node` is a view of, or `node`."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """Heads and their width of rows [tokens, heads, dim] or [tokens, dim].

    Raises:
        NoRowForm: they have another form, or no size that a kernel can be made for.
    """
    sizes = [size_of(extent) for extent in value.shape[1:]]
    fixed = all(isinstance(extent, int) and extent > 0 for extent in sizes)
    if len(sizes) not in (1, 2) or not fixed or sizes[-1] > _WIDEST_ROW:
        raise NoRowForm(str(tuple(value.shape)))
    return (1, *sizes)[-2:]


def _places(value: torch.Tensor) -> list[Any]:
    """The index of each dimension of a value [tokens, heads, dim] or [tokens, dim]."""
    dim = ["dim", size_of(value.shape[-1])]
    return [["token"], ["head"], dim] if value.dim() == 3 else [["token"], dim]


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions of `value` from the outermost in memory inwards; None where it has gaps."""
    for order in permutations(range(value.dim())):
        stride: Any = 1
        dense = True
        for d in reversed(order):
            dense = dense and (same_size(value.stride(d), stride) or same_size(value.shape[d], 1))
            stride = stride * value.shape[d]
        if dense:
            return list(order)
    return None
