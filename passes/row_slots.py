"""Ids that the kernel of a store can read as they are, so that no other kernel prepares them.

The ids of a store are checked, and "none" is sent to the sink row, in the prologue: once for all
layers. In the graph of a single layer, as regional compilation makes it, that is a launch for one
store. The kernel that writes the rows checks its slots as well, and can do both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .emit import same_size
from .hoist import Prologue
from .lower import FAR
from .schema import tensors

aten = torch.ops.aten


def plain_ids(slots: Node, puts: list[Node], prologue: Prologue) -> Node | None:
    """The ids behind `slots`, int32 or int64 `[tokens]` with -1 for "none".

    None where the prologue has something else to compute, where anybody but `puts` reads the
    slots, or where the ids have another bound than the number of rows of what is written.
    """
    if slots.target is not operator.getitem or not all(user in puts for user in slots.users):
        return None
    call = slots.args[0]
    if not isinstance(call, Node) or call.target is not torch.ops.swa.materialize_all.default:
        return None
    values: list[Node] = call.args[0]  # type: ignore[assignment]
    if len(values) != 1:
        return None
    found = _behind(values[0])
    if found is None:
        return None
    ids, upper = found
    if ids.target is torch.ops.prims.convert_element_type.default:
        ids = ids.args[0]  # type: ignore[assignment]
    if ids in prologue.nodes or tensors(ids)[0].dtype not in (torch.int32, torch.int64):
        return None
    return ids if all(same_size(_rows(put, slots), upper) for put in puts) else None


def _rows(put: Node, slots: Node) -> Any:
    """How many rows `slots` may name in what `put` writes, which may be one layer of several."""
    index: list[Node | None] = put.args[1]  # type: ignore[assignment]
    return tensors(put)[0].shape[index.index(slots)] if slots in index else None


def _behind(slots: Node) -> tuple[Node, int | Node] | None:
    """Ids and their bound, where `slots` is what `stopped` makes of ids without their -1."""
    if slots.target is not aten.where.self:
        return None
    bad, far, kept = slots.args
    assert isinstance(bad, Node) and isinstance(far, Node) and isinstance(kept, Node)
    if far.target is not aten.full.default or far.args[1] != FAR:
        return None
    if kept.target is not aten.clamp_min.default or kept.args[1] != 0:
        return None
    if bad.target is not aten.logical_or.default:
        return None
    below, beyond = bad.args
    assert isinstance(below, Node) and isinstance(beyond, Node)
    ids = kept.args[0]
    if (below.target, below.args) != (aten.lt.Scalar, (ids, -1)):
        return None
    if beyond.target is not aten.ge.Scalar or beyond.args[0] is not ids:
        return None
    return ids, beyond.args[1]  # type: ignore[return-value]
