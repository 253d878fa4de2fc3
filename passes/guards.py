"""Faults of torch that would write other rows than eager code does, refused by name.

Each was seen with plain `aot_eager` or plain Inductor and any operator that writes;
docs/legality.md lists them. A forward that meets one is refused loudly: nobody looks for a wrong
cache row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .emit import same_size, size_of
from .errors import PassError
from .schema import (
    FunctionalizedCall,
    functionalized_call,
    history,
    is_functionalized_v1,
    is_view,
    tensors,
    updated_base,
)
from .view_sizes import places_left


def refuse_version_1(graph: Graph) -> None:
    """Version 1 of the functionalization wrapper clones whole caches and, for stacked ones,
    writes wrong rows in every layer after the first.

    Raises:
        PassError: naming the node.
    """
    for node in graph.nodes:
        if is_functionalized_v1(node):
            raise PassError(
                f"'{node.name}' was functionalized with version 1 of torch's wrapper "
                "(enable_auto_functionalized_v2=False), which clones KV caches and can write "
                "wrong rows; leave torch._inductor.config.enable_auto_functionalized_v2 on"
            )


def writes_parts_as_wider_dtypes() -> bool:
    """True where this torch's Inductor writes a part of a byte tensor, seen as bfloat16, right."""
    from torch._inductor.fx_passes import post_grad

    return hasattr(post_grad, "fix_auto_functionalized_dtype_views")  # torch 2.13 and later


def refuse_mixed_dtypes(graph: Graph) -> None:
    """Writes through views of another dtype in forms that Inductor gets wrong.

    These are one input written through views of two dtypes, and before torch 2.13 a part of an
    input written through a view of another element size.

    Raises:
        PassError: naming the input and the dtypes.
    """
    seen: dict[Node, set[torch.dtype]] = {}
    for call in _calls(graph):
        for base in call.bases:
            root = history(base)[-1]
            (whole,), (part,) = tensors(root), tensors(base)
            seen.setdefault(root, set()).add(part.dtype)
            partly = part.itemsize != whole.itemsize and not _same_bytes(part, whole)
            if partly and not writes_parts_as_wider_dtypes():
                raise PassError(
                    f"a part of '{root.name}' ({whole.dtype}) is written as {part.dtype}: before "
                    "torch 2.13 Inductor writes wrong rows. Keep two tensors, or a newer torch."
                )
    for root, dtypes in seen.items():
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype) for dtype in dtypes))
            raise PassError(
                f"'{root.name}' is written through views of dtype {names}: Inductor would mix up "
                "their rows. Write all of a row through one dtype, or keep two tensors."
            )


def refuse_shifted_writes(graph: Graph) -> None:
    """Raise where torch would write other rows than eager code does.

    It describes a written view by its place in the storage, and regenerates it from the base: a
    slice from the offset divided by the row's size, anything else by absolute strides and offset.
    The one is wrong for an input that begins further into its storage; the other for such an input
    under Inductor with symbolic sizes, and for one with gaps, too, where a plain write has put a
    contiguous tensor in its place.

    Raises:
        PassError: naming the operator and the base.
    """
    for call in _calls(graph):
        if call.unknown:
            raise PassError(
                f"torch {torch.__version__} describes what {call.op} writes with "
                f"{', '.join(call.unknown)}, which this version of the passes does not know; "
                "where it writes cannot be checked"
            )
        for name, view in call.written.items():
            if view is None or view.kind not in ("slice", "strided"):
                continue
            past = history(view.base)
            if places_left(call):
                raise PassError(
                    f"{call.op} writes a view of '{past[-1].name}' (argument '{name}') whose place "
                    "depends on sizes that no input has: Inductor would write shifted rows, at the "
                    "start of the whole tensor. Take the view by sizes of inputs or by constants."
                )
            if is_plain(past[-1]):
                continue
            rewritten = any(
                step.op == "call_function" and updated_base(step) is None and not is_view(step)
                for step in past[:-1]
            )
            (root,) = tensors(past[-1])
            ahead = not same_size(root.storage_offset(), 0)
            fixed = all(isinstance(size_of(x), int) for x in _flat(view.where))
            if rewritten or (ahead and (view.kind == "slice" or not fixed)):
                raise PassError(
                    f"{call.op} writes a view of '{past[-1].name}' (argument '{name}'), which "
                    "is itself a part of a larger tensor: torch would write shifted rows. Hand in "
                    "the whole tensor and take the view in the model, or hand in a copy."
                )


def is_plain(node: Node) -> bool:
    (value,) = tensors(node)
    return value.is_contiguous() and same_size(value.storage_offset(), 0)


def _flat(where: tuple[Any, ...]) -> list[Any]:
    """The numbers of a view's description, sizes and strides taken apart."""
    return [x for item in where for x in (item if isinstance(item, tuple) else (item,))]


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where `a` is known to be all of `b`, in whatever dtype."""
    if a.dim() != b.dim() or a.dim() == 0:
        return False
    rows = all(same_size(x, y) for x, y in zip(a.shape[:-1], b.shape[:-1], strict=True))
    last = [size_of(tensor.shape[-1]) for tensor in (a, b)]
    return rows and last[0] * a.itemsize == last[1] * b.itemsize


def _calls(graph: Graph) -> list[FunctionalizedCall]:
    found = (functionalized_call(node) for node in graph.nodes)
    return [call for call in found if call is not None]
