"""Have Inductor compute the prologue's values once.

Inductor copies cheap expressions into every kernel that uses them, and a gather counts as cheap:
left alone, it puts `mapping[loc]` into each layer's kernel again, and the mapping is read forty
times after all. `swa::materialize` marks a value that has to become a buffer.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .hoist import Prologue
from .schema import is_view, reaching_output


def materialize(graph: Graph, prologue: Prologue) -> int:
    """Mark each computed tensor of the prologue that the rest of the graph uses; returns how many.

    Left alone are views (they cost nothing), results of opaque operators and graph outputs, all of
    which are buffers anyway.
    """
    marked = 0
    outputs = reaching_output(graph)
    for node in [node for node in graph.nodes if node in prologue.nodes]:
        if node in outputs or not _is_inlined(node):
            continue
        if all(user in prologue.nodes for user in _through_views(node)):
            continue
        emit = prologue.emitter(graph)
        emit.cursor = node
        kept = emit.call(torch.ops.swa.materialize.default, node, like=node)
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
        if prologue.last is node:
            prologue.last = kept
        marked += 1
    return marked


def _is_inlined(node: Node) -> bool:
    """True for a computed tensor that Inductor would inline into its users."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace in ("aten", "prims")
        and isinstance(node.meta.get("val"), torch.Tensor)
        and not is_view(node)
    )


def register_inductor_lowering() -> None:
    """Tell Inductor what `swa::materialize` and `swa::fresh` mean. Without it both are copies made
    by a kernel of their own: right, slower."""
    from torch._inductor import ir
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
        x.realize()
        # Fused with layer code it would be computed there, and what follows it in the prologue
        # behind that. On a GPU, prologue values have to fuse with one another instead.
        if x.get_device().type == "cpu":
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
