"""Put every translation of a graph into one node behind the last placeholder."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ..ops.marks import named_call
from .emit import Emitter, copy_provenance, same_layout, size_of
from .errors import PassError
from .model_source import source_line
from .numbering import Numbering
from .origins import Origins
from .report import Refusal, Value
from .schema import ancestors, is_view, tensors
from .trace_order import traced_places
from .translations import TranslatedValue, find_calls, group
from .views import replay


@dataclass
class Prologue:
    """The nodes at the start of the graph that index inputs alone decide.

    Attributes:
        last: the node behind which the next one goes.
        nodes: what stands in it, placeholders not counted.
    """

    last: Node
    nodes: set[Node] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph) -> Prologue:
        """An empty prologue behind the last placeholder of `graph`."""
        last = next(iter(graph.nodes)).prev  # the root, ahead of all nodes: a graph may lack inputs
        for node in graph.nodes:
            if node.op == "placeholder":
                last = node
        return cls(last)

    def emitter(self, graph: Graph) -> Emitter:
        """Inserts at the end of the prologue; hand it back to `close`."""
        return Emitter(graph, self.last, self.nodes.add)

    def erase(self, node: Node) -> None:
        """Remove a node that nothing uses."""
        if self.last is node:
            self.last = node.prev
        self.nodes.discard(node)
        node.graph.erase_node(node)

    def close(self, emitter: Emitter) -> None:
        self.last = emitter.cursor


@dataclass(frozen=True)
class Answer:
    """Which node answers which calls, for dumps; the calls are gone from the graph.

    Attributes:
        node: name of the translation node, or of its item of the one node.
        calls: names of the calls that it answers.
    """

    node: str
    calls: tuple[str, ...]


@dataclass
class Hoisted:
    """What the hoist did.

    Attributes:
        found: calls of translation ops that the graph held.
        values: the distinct values, for the report.
        refused: the values that could not join the one node.
        nodes: the one node; none where nothing could be hoisted, several for chained ids.
        single: the translation nodes of refused values.
        left: those of `single` that stand outside the prologue.
        answers: what became of each of `values`, in their order.
    """

    found: int = 0
    values: list[Value] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    single: list[Node] = field(default_factory=list)
    left: int = 0
    answers: list[Answer] = field(default_factory=list)


def hoist(graph: Graph, prologue: Prologue) -> Hoisted:
    """Replace all translation calls of `graph` by one `swa::translate_many` in the prologue.

    Values that may not move (see `translations`) get one node each, right behind the last of
    their operands: the earliest point that dominates all uses, since every use depends on them.
    Where ids are themselves translated ids (a unified pool's, say, then the SWA pool's), each
    link of the chain needs a node of its own.
    """
    result = Hoisted()
    places = traced_places(find_calls(graph))
    while calls := _independent([n for n in find_calls(graph) if n not in result.single]):
        result.found += len(calls)
        values = group(calls, Numbering(), Origins(graph))
        result.values += [_describe(value, places) for value in values]
        free = [value for value in values if value.refusal is None]
        if free:
            result.nodes.append(_hoist_together(graph, free, prologue))
        for value in values:
            if value.refusal is not None:
                _place_alone(graph, value, prologue, result, places)
        result.answers += [_describe_answer(value) for value in values]
    return result


def _independent(calls: list[Node]) -> list[Node]:
    """Those of `calls` whose operands do not come out of another of them."""
    if not calls:
        return []
    todo = set(calls)
    behind: set[Node] = set()
    for node in calls[0].graph.nodes:
        if any(arg in behind or arg in todo for arg in node.all_input_nodes):
            behind.add(node)
    return [call for call in calls if call not in behind]


def _hoist_together(graph: Graph, values: list[TranslatedValue], prologue: Prologue) -> Node:
    """One node for `values`, behind the cones of their operands."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    emit = prologue.emitter(graph)
    cone = ancestors(
        [operand for value in values for operand in value.operands],
        stop=lambda node: node.op == "placeholder" or node in prologue.nodes,
    )
    for node in sorted(cone, key=order.__getitem__):
        emit.move(node)
        prologue.nodes.add(node)
    together = emit.call(
        torch.ops.swa.translate_many.default,
        [value.mapping for value in values],
        [value.loc for value in values],
        [value.op.name() for value in values],
        [0 if value.page_size is None else value.page_size for value in values],
        like=values[0].uses[0].call,
    )
    items = [
        emit.call(operator.getitem, together, i, like=value.uses[0].call)
        for i, value in enumerate(values)
    ]
    prologue.close(emit)
    for value, item in zip(values, items, strict=True):
        _answer(value, item)
    return together


def _place_alone(
    graph: Graph,
    value: TranslatedValue,
    prologue: Prologue,
    result: Hoisted,
    places: dict[Node, int],
) -> None:
    """A node for a refused value, right behind its operands."""
    assert value.refusal is not None
    code, message = value.refusal
    call = value.uses[0].call
    refusal = Refusal(code, message, call.name, source_line(call), places[call])
    result.refused.append(refusal)
    early = all(op.op == "placeholder" or op in prologue.nodes for op in value.operands)
    if early:
        emit = prologue.emitter(graph)
    else:
        place = {node: i for i, node in enumerate(graph.nodes)}
        operands = [op for op in value.operands if op.op != "placeholder"]
        emit = Emitter(graph, max(operands, key=place.__getitem__))
        result.left += 1
    op, args = named_call(value.op.name(), value.mapping, value.loc, value.page_size)
    single = emit.call(op, *args, like=call)
    result.single.append(single)
    if early:
        prologue.close(emit)
    _answer(value, single)


def _answer(value: TranslatedValue, translated: Node) -> None:
    """Give every use of `value` its view of `translated` and remove the calls.

    A view is made where the first call stood that needs it: there the sizes are known that it is
    made with. It computes nothing, and what there is to move moves with the invariants.
    """
    value.answer = translated.name
    views: dict[tuple[Node, ...], Node] = {(): translated}
    for use in value.uses:
        (like,) = tensors(use.call)
        view = views.get(use.steps)
        if view is None:
            emit = Emitter(use.call.graph, use.call.prev)
            view = views[use.steps] = replay(use.steps, translated, like, emit)
        _check_replacement(use.call, view)
        _keep_outputs_apart(use.call)
        use.call.replace_all_uses_with(view)
        use.call.graph.erase_node(use.call)


def _check_replacement(call: Node, view: Node) -> None:
    """Raise `PassError` unless `view` has the dtype, sizes and strides of what it replaces."""
    (old,), (new,) = tensors(call), tensors(view)
    if old.dtype is not new.dtype or not same_layout(old, new):
        raise PassError(
            f"'{call.name}' gives {old.dtype} of sizes {list(old.shape)} and strides "
            f"{list(old.stride())}, and its hoisted value '{view.name}' {new.dtype} of sizes "
            f"{list(new.shape)} and strides {list(new.stride())}"
        )


def _keep_outputs_apart(call: Node) -> None:
    """Clone for each graph output that `call` reaches, where eager code gives separate tensors.

    Each call of a translation returns a fresh tensor. After merging they are one, and two graph
    outputs that are that one (or views of it) would alias.
    """
    todo = [call]
    while todo:
        node = todo.pop()
        for user in list(node.users):
            if user.op == "output":
                with call.graph.inserting_before(user):
                    clone = call.graph.call_function(torch.ops.swa.fresh.default, (call,))
                copy_provenance(clone, call)
                clone.meta["val"] = call.meta["val"]
                _route_outputs(call, clone)
                return
            if is_view(user):
                todo.append(user)


def _route_outputs(call: Node, clone: Node) -> None:
    """Let the views that reach the output, and the output itself, start from `clone`."""
    reaching: set[Node] = set()

    def reaches(node: Node) -> bool:
        hit = any(user.op == "output" or (is_view(user) and reaches(user)) for user in node.users)
        if hit:
            reaching.add(node)
        return hit

    for user in list(call.users):
        if user is clone:
            continue
        if user.op == "output" or (is_view(user) and reaches(user)):
            user.replace_input_with(call, clone)
    # The views stay where they stood, and the clone has to stand ahead of them.
    place = {node: i for i, node in enumerate(call.graph.nodes)}
    min(clone.users, key=place.__getitem__).prepend(clone)


def _describe_answer(value: TranslatedValue) -> Answer:
    return Answer(value.answer, tuple(use.call.name for use in value.uses))


def _describe(value: TranslatedValue, places: dict[Node, int]) -> Value:
    (loc,), call = tensors(value.loc), value.uses[0].call
    shape = tuple(size if isinstance(size := size_of(dim), int) else str(size) for dim in loc.shape)
    dtype = str(loc.dtype).removeprefix("torch.")
    uses, source = len(value.uses), source_line(call)
    code = "" if value.refusal is None else value.refusal[0]
    names = value.mapping.name, value.loc.name
    return Value(*names, shape, dtype, uses, source, code, places[call])
