"""Have Inductor compute the prologue's values once.

Inductor copies cheap expressions into every kernel that uses them, and a gather counts as cheap:
left alone, it puts `mapping[loc]` into each layer's kernel again, and the mapping is read forty
times after all. `swa::materialize` marks a value that has to become a buffer.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .emit import Emitter
from .hoist import Prologue
from .lower import checked_on_the_host
from .schema import is_view, reaching_output, tensors


def materialize(graph: Graph, prologue: Prologue) -> int:
    """Mark each computed tensor of the prologue that the rest of the graph uses; returns how many.

    Left alone are views (they cost nothing), results of opaque operators and graph outputs, all of
    which are buffers anyway.

    On a GPU one kernel computes all of them, whatever their shapes: there a value that another
    one builds on is computed twice, which costs less than a second launch. On a CPU it is not.
    With several GPUs in one graph each has its own.
    """
    outputs = reaching_output(graph)
    wanted = [
        node
        for node in graph.nodes
        if node in prologue.nodes
        and node not in outputs
        and _is_inlined(node)
        and not all(user in prologue.nodes for user in _through_views(node))
    ]
    together: dict[torch.device, list[Node]] = {}
    for node in wanted:
        if checked_on_the_host(node):
            _materialize_alone(graph, prologue, node)
        else:
            (value,) = tensors(node)
            together.setdefault(value.device, []).append(node)
    for nodes in together.values():
        _materialize_together(graph, prologue, nodes)
    return len(wanted)


def _materialize_alone(graph: Graph, prologue: Prologue, node: Node) -> None:
    emit = prologue.emitter(graph)
    emit.cursor = node
    kept = emit.call(torch.ops.swa.materialize.default, node, like=node)
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    if prologue.last is node:
        prologue.last = kept


def _materialize_together(graph: Graph, prologue: Prologue, nodes: list[Node]) -> None:
    """One call at the end of the prologue. Values of the prologue go on using what is inlined, so
    that no value of the call waits for another."""
    emit = prologue.emitter(graph)
    call = emit.call(torch.ops.swa.materialize_all.default, nodes, like=nodes[0])
    items = [emit.call(operator.getitem, call, i, like=node) for i, node in enumerate(nodes)]
    for node, item in zip(nodes, items, strict=True):
        _hand_over(node, item, prologue, emit)
    prologue.close(emit)


def _hand_over(node: Node, kept: Node, prologue: Prologue, emit: Emitter) -> None:
    """Have what is outside the prologue use `kept` instead of `node`, views of it included."""
    for user in list(node.users):
        if user not in prologue.nodes:
            user.replace_input_with(node, kept)
        elif is_view(user) and any(after not in prologue.nodes for after in _through_views(user)):
            args = map_arg(user.args, lambda arg: kept if arg is node else arg)
            view = emit.call(user.target, *args, like=user, **dict(user.kwargs))
            _hand_over(user, view, prologue, emit)
            if not user.users:
                prologue.erase(user)


def _is_inlined(node: Node) -> bool:
    """True for a computed tensor that Inductor would inline into its users, and should not."""
    return (
        node.target is not torch.ops.aten.full.default  # a constant costs nothing where it is used
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("aten", "prims")
        and isinstance(node.meta.get("val"), torch.Tensor)
        and not is_view(node)
    )


def register_inductor_lowering() -> None:
    """Tell Inductor what `swa::materialize` and `swa::fresh` mean. Without it both are copies made
    by a kernel of their own: right, slower."""
    from torch._inductor import ir
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.lowering import clone, lowerings, register_lowering
    from torch._inductor.virtualized import V

    if torch.ops.swa.materialize.default in lowerings:
        return

    @register_lowering(torch.ops.swa.materialize.default, type_promotion_kind=None)
    def _materialize(x):  # type: ignore[no-untyped-def]
        inner = getattr(x.data, "data", None)
        if not isinstance(inner, (ir.Pointwise, ir.Reduction)):
            # A buffer already, perhaps a graph input: Inductor took away the clone in between.
            # Whoever writes the result in place must not write that.
            x = clone(x)
        return _kept(x)

    @register_lowering(torch.ops.swa.materialize_all.default, type_promotion_kind=None)
    def _materialize_all(values):  # type: ignore[no-untyped-def]
        # Copies, while none of them is a buffer: each is then computed from the graph's inputs.
        kept = [_kept(copy) for copy in [clone(x) for x in values]]
        # What Inductor has for `_foreach` operators: one kernel for loops of any shapes.
        loops = [x.get_operation_name() for x in kept]
        if len(loops) > 1 and V.graph.has_feature(kept[0].get_device(), BackendFeature.FOREACH):
            V.graph.register_operation_list(loops)
        return kept

    def _kept(x):  # type: ignore[no-untyped-def]
        x.realize()
        # Fused with layer code it would be computed there, and what follows it in the prologue
        # behind that.
        V.graph.no_fuse_buffer_names.add(x.get_name())
        return x

    @register_lowering(torch.ops.swa.fresh.default, type_promotion_kind=None)
    def _fresh(x):  # type: ignore[no-untyped-def]
        return clone(x)


def _through_views(node):  # type: ignore[no-untyped-def]
    """The users of `node`, with views of it replaced by their users."""
    for user in node.users:
        if is_view(user):
            yield from _through_views(user)
        yield user
