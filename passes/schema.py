"""What an FX node does, read from the schema of its operator and from nothing else.

No table of known operators decides what is written or aliased: `alias_info` does. The only names
here are those of torch's own functionalization wrappers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Node

from ..ops.marks import store_mark, translation_mark

# Namespaces whose operators keep the contract "no write declared, no effect": torch's own and
# ours. Anybody else's operator must be marked to be merged or moved.
_PURE_NAMESPACES = frozenset({"aten", "prims", "swa"})

# Builtins that AOTAutograd leaves in a graph, all of them on SymInts or on tuples.
_PURE_MODULES = frozenset({"_operator", "math", "torch"})


def is_pure(node: Node) -> bool:
    """True where two calls of `node` with the same arguments give one value and no effect."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in _PURE_MODULES
    # An output size that is only known once the data is: such a node stays where its guards are.
    if node.meta.get("unbacked_bindings"):
        return False
    if target.namespace in _PURE_NAMESPACES:
        return _keeps_the_contract(target)
    return translation_mark(target) is not None and not node.is_impure()


@functools.cache
def _keeps_the_contract(op: torch._ops.OpOverload) -> bool:
    """True for an operator of torch or of ours without writes, random numbers or host syncs."""
    return not (
        op._schema.is_mutable
        or torch.Tag.data_dependent_output in op.tags
        or torch.Tag.nondeterministic_seeded in op.tags
    )


def is_view(node: Node) -> bool:
    """True where `node` writes nothing and its result may share storage with an argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(ret.alias_info is not None for ret in schema.returns)


def tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that `node` gives: none for a SymInt, several for a tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def bind(target: torch._ops.OpOverload, node: Node) -> dict[str, Any]:
    """The arguments of `node` by schema name, defaults filled in."""
    bound = {arg.name: arg.default_value for arg in target._schema.arguments}
    for arg, value in zip(target._schema.arguments, node.args, strict=False):
        bound[arg.name] = value
    bound.update(node.kwargs)
    return bound


@dataclass(frozen=True)
class View:
    """How a functionalized call sees one written argument: as a view of `base`.

    Attributes:
        base: the tensor that owns the storage in this graph, `bases[base_index]`.
        kind: "whole", "slice" (of one dimension) or "strided".
        where: of a slice (dim, start, end); of a strided view (size, stride, storage offset).
    """

    base: Node
    base_index: int
    kind: str
    where: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FunctionalizedCall:
    """A call of a writing operator as AOTAutograd left it: `auto_functionalized_v2`.

    Attributes:
        node: the wrapper's node; its value is (returns of op..., new value of each base).
        op: the operator inside.
        args: the arguments that are not written, by schema name.
        written: the written arguments, by schema name; those of a list as "name[i]".
        bases: the tensors that get new values, in order.
        returns: how many values op itself returns ahead of the bases.
        unknown: what torch says besides, in words of a version that we do not know.
    """

    node: Node
    op: torch._ops.OpOverload
    args: dict[str, Any]
    written: dict[str, View | None]
    bases: tuple[Node, ...]
    returns: int
    unknown: tuple[str, ...] = ()

    def result(self, base_index: int) -> list[Node]:
        """The getitem nodes that take the new value of base `base_index`."""
        wanted = self.returns + base_index
        return [
            user
            for user in self.node.users
            if user.target is operator.getitem and user.args[1] == wanted
        ]


def updated_base(item: Node) -> Node | None:
    """The base whose new value `item` takes from a functionalized call, or None."""
    source = item.args[0] if item.target is operator.getitem else None
    call = functionalized_call(source) if isinstance(source, Node) else None
    if call is None:
        return None
    index = item.args[1]
    assert isinstance(index, int)
    return call.bases[index - call.returns] if index >= call.returns else None


def history(node: Node) -> list[Node]:
    """What `node` may have been before the forward updated it: `node` first, the oldest last.

    Goes back through views, functionalized writes, and anything that has the dtype and rank of
    its first operand and so could be an update of it (`cache.add_(1)` is `add(cache, 1)` here).
    """
    found = [node]
    while node.op == "call_function":
        base = updated_base(node)
        source = node.args[0] if base is None and node.args else base
        if not isinstance(source, Node):
            break
        if base is None and not is_view(node):
            before, after = tensors(source), tensors(node)
            if not (len(before) == len(after) == 1 and _alike(before[0], after[0])):
                break
        node = source
        found.append(node)
    return found


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where `b` could be `a` after an update: same dtype and rank."""
    return a.dtype is b.dtype and a.dim() == b.dim()


def functionalized_call(node: Node) -> FunctionalizedCall | None:
    """`node` as a functionalized call, or None where it is none (or not of version 2)."""
    if node.op != "call_function" or node.target is not auto_functionalized_v2:
        return None
    op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    kwargs = dict(node.kwargs)
    bases = tuple(kwargs.pop("_all_bases"))  # type: ignore[arg-type]
    schema = op._schema
    args: dict[str, Any] = {}
    written: dict[str, View | None] = {}
    for arg in schema.arguments:
        if arg.alias_info is not None and arg.alias_info.is_write:
            written.update(_take_views(arg, kwargs, bases))
        else:
            args[arg.name] = kwargs.pop(arg.name, arg.default_value)
    # An op that returns nothing still takes slot 0 of the wrapper's tuple, as None.
    returns = max(len(schema.returns), 1)
    return FunctionalizedCall(node, op, args, written, bases, returns, tuple(kwargs))


def is_functionalized_v1(node: Node) -> bool:
    """True for the first version of the wrapper, which clones whole caches."""
    return node.op == "call_function" and node.target is auto_functionalized


def is_store(call: FunctionalizedCall) -> bool:
    """True where the operator inside is marked as a KV store."""
    return store_mark(call.op) is not None


def collective(node: Node) -> str:
    """What `node` has ranks do together, as "all_reduce(sum)"; "" where it is no collective."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "_c10d_functional":
        return ""
    name = op._schema.name.partition("::")[2]
    if name.startswith("wait_tensor"):
        return ""
    given = bind(op, node)
    kept = [
        str(given[arg.name])
        for arg in op._schema.arguments
        if arg.name != "group_name" and not isinstance(arg.type, (torch.TensorType, torch.ListType))
    ]
    return f"{name}({', '.join(kept)})"


def written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Placeholders that the forward writes: the targets of the epilogue's `copy_`."""
    written: set[Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default:
            target = node.args[0]
            while target.op == "call_function" and is_view(target):
                target = target.args[0]
            if target.op == "placeholder":
                written.add(target)
    return written


def reaching_output(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that a graph output is, or is a view of: merging those would alias two outputs."""
    found: set[Node] = set()
    todo = [arg for node in graph.nodes if node.op == "output" for arg in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if is_view(node):
            todo += node.all_input_nodes
    return found


def ancestors(nodes: list[Node], stop: Callable[[Node], bool]) -> set[Node]:
    """`nodes` and everything that they are computed from, not going past nodes where `stop`."""
    seen: set[Node] = set()
    todo = [node for node in nodes if not stop(node)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [arg for arg in node.all_input_nodes if arg not in seen and not stop(arg)]
    return seen


def _take_views(
    arg: torch.Argument, kwargs: dict[str, Any], bases: tuple[Node, ...]
) -> dict[str, View | None]:
    """Take out of `kwargs` how torch describes `arg`; one entry for each tensor of a list."""
    prefix = f"_{arg.name}"
    if f"{prefix}_length" in kwargs:
        length = kwargs.pop(f"{prefix}_length") or 0
        return {
            f"{arg.name}[{i}]": _take_view(f"{prefix}_{i}", kwargs, bases) for i in range(length)
        }
    return {arg.name: _take_view(prefix, kwargs, bases)}


def _take_view(prefix: str, kwargs: dict[str, Any], bases: tuple[Node, ...]) -> View | None:
    index = kwargs.pop(f"{prefix}_base_index")
    if index is None:
        return None
    base = bases[index]
    for kind, parts in _VIEW_KINDS.items():
        names = [f"{prefix}_{part}" for part in parts]
        if all(name in kwargs for name in names):
            where = tuple(kwargs.pop(name) for name in names)
            where = tuple(tuple(x) if isinstance(x, (list, tuple)) else x for x in where)
            return View(base, index, kind, () if kind == "whole" else where)
    return View(base, index, "whole")


# How torch may describe a view of a base; without any of these it is the base.
_VIEW_KINDS = {
    "whole": ("alias",),
    "slice": ("slice_dim", "slice_start", "slice_end"),
    "strided": ("size", "stride", "storage_offset"),
}
