"""A graph at one stage as plain data: what a page, a diff or a test can read without torch.

Each node is a dict with these keys; those that would be empty are left out:

    name, op, target   as FX prints them
    kind               what it is in the story of a forward, see `KINDS`
    args               names of the nodes it reads, once per place
    shape, dtype       of its value; a size is an int or the text of a symbolic one
    values             of a tuple, the number of its items
    module             path of the module that it was traced in, e.g. "layers.3.attention"
    source             "file:line" of the model's own code
    stack              index into the dump's table of stack traces
    prologue           true where it stands in the prologue
    place              of an input, among the arguments that AOTAutograd was given
    caches             names of the graph inputs that a store writes or an attention call reads
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.marks import store_mark, translation_mark
from .emit import size_of
from .hoist import Prologue
from .model_source import module_path, source_line
from .schema import functionalized_call, is_store, is_view, updated_base, written_inputs
from .subgraphs import children

KINDS = {
    "input": "input of the graph",
    "translation": "call of a translation operator",
    "hoisted": "the one node that all translations became",
    "store": "write of KV-cache rows",
    "attention": "operator that reads a KV cache",
    "subgraph": "call of a body: a region, a branch or a loop",
    "size": "size or arithmetic on sizes",
    "view": "view of another value, or an item of a tuple",
    "write_back": "hands the final value of a written input back",
    "constant": "constant or attribute",
    "output": "outputs of the graph",
    "compute": "anything else",
}

_BODY_CALLS = frozenset({"invoke_subgraph", "cond", "while_loop", "scan"})


def describe(
    graph: Graph, prologue: Prologue | None = None, stacks: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """The nodes of `graph` in order, as the module's docstring says.

    Args:
        graph: Dynamo's, AOTAutograd's, or what the passes made of it.
        prologue: what the passes have put at the start so far.
        stacks: the dump's table of stack traces, which new ones are added to.
    """
    stacks = {} if stacks is None else stacks
    roots = _roots(graph)
    written = {node.name for node in written_inputs(graph)}
    stored = {
        root.name
        for node in graph.nodes
        for root in _written_caches(node, roots, written)
        if root is not None
    }
    return [_describe(node, roots, written, stored, prologue, stacks) for node in graph.nodes]


def _describe(
    node: Node,
    roots: dict[Node, Node],
    written: set[str],
    stored: set[str],
    prologue: Prologue | None,
    stacks: dict[str, int],
) -> dict[str, Any]:
    stores_into = [root.name for root in _written_caches(node, roots, written)]
    reads = [
        name
        for arg in node.all_input_nodes
        if (name := roots[arg].name if arg in roots else "") in stored
    ]
    kind = _kind(node, bool(stores_into), bool(reads))
    found: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": _target(node),
        "kind": kind,
        "args": [arg.name for arg in _operands(node)],
        **_value(node),
        "module": module_path(node),
        "source": source_line(node),
        "prologue": prologue is not None and node in prologue.nodes,
        "caches": stores_into if kind == "store" else reads if kind == "attention" else [],
    }
    trace = node.meta.get("stack_trace")
    if trace:
        found["stack"] = stacks.setdefault(str(trace), len(stacks))
    place = getattr(node.meta.get("desc"), "idx", None)
    if node.op == "placeholder" and isinstance(place, int):
        found["place"] = place
    empty: tuple[Any, ...] = ("", [], None)
    return {key: value for key, value in found.items() if value is not False and value not in empty}


def _kind(node: Node, writes_cache: bool, reads_cache: bool) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return "output"
    if node.op == "get_attr":
        return "constant"
    op = _overload(node.target)
    name = str(node.target)
    if translation_mark(op) is not None:
        return "translation"
    if node.target is torch.ops.swa.translate_many.default:
        return "hoisted"
    if writes_cache or store_mark(op) is not None:
        return "store"
    if isinstance(node.target, torch._ops.HigherOrderOperator) and name in _BODY_CALLS:
        return "subgraph"
    if node.target is operator.getitem or is_view(node):
        return "view"
    if node.target is torch.ops.aten.copy_.default:
        return "write_back"
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt, torch.SymBool)):
        return "size"
    foreign = isinstance(op, torch._ops.OpOverload) and op.namespace not in ("aten", "prims")
    if "attention" in name or "attn" in name or (reads_cache and foreign):
        return "attention"
    return "compute"


def _overload(target: Any) -> Any:
    """The default overload of a packet, which Dynamo's graphs call."""
    return getattr(target, "default", target) if isinstance(target, _PACKET) else target


_INDEX_PUT = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_PACKET = torch._ops.OpOverloadPacket


def _written_caches(node: Node, roots: dict[Node, Node], written: set[str]) -> Iterator[Node]:
    """The graph inputs whose rows `node` writes, as a store does."""
    call = functionalized_call(node)
    if call is not None:
        if is_store(call):
            yield from (roots[base] for base in call.bases if base in roots)
    elif node.target is torch.ops.aten.index_put.default:
        root = roots.get(node)
        if root is not None and root.name in written:
            yield root
    else:
        written_args = _store_targets(node)
        yield from (roots[arg] for arg in written_args if isinstance(arg, Node) and arg in roots)


def _store_targets(node: Node) -> list[Any]:
    """What a store writes in place, as Inductor's own passes leave it."""
    if node.target is torch.ops.aten.index_put_.default:
        return [node.args[0]]
    mark = store_mark(node.target)
    return [] if mark is None else [node.args[i] for i in mark.caches]


def _roots(graph: Graph) -> dict[Node, Node]:
    """For each node that is a graph input, a view of one or its updated value: that input."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = node
            continue
        source: Any = updated_base(node) if node.op == "call_function" else None
        if source is None and (is_view(node) or node.target in _INDEX_PUT):
            source = node.args[0] if node.args else None
        if isinstance(source, Node) and source in roots:
            roots[node] = roots[source]
    return roots


def _operands(node: Node) -> Iterator[Node]:
    """The nodes that `node` reads, in the order of its arguments, repeated ones repeated."""
    found: list[Node] = []

    def take(arg: Node) -> Node:
        found.append(arg)
        return arg

    torch.fx.node.map_arg((node.args, node.kwargs), take)
    yield from found


def _target(node: Node) -> str:
    call = functionalized_call(node)
    if call is not None:
        return call.op.name()
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    name = getattr(target, "__name__", None)
    return str(name or target)


def _value(node: Node) -> dict[str, Any]:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        shape = [size if isinstance(size := size_of(dim), int) else str(dim) for dim in value.shape]
        about: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch.")}
        about["shape"] = shape if shape else "scalar"
        if value.device.type != "cpu":
            about["device"] = str(value.device)
        return about
    if isinstance(value, (tuple, list)):
        return {"values": len(value)}
    if isinstance(value, (int, torch.SymInt, torch.SymBool, torch.SymFloat)):
        return {"dtype": "size", "shape": str(value)}
    return {}


def bodies(graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """The nodes of each body that `graph` calls, by its name there."""
    return {name: describe(child.graph) for name, child in children(graph).items()}
