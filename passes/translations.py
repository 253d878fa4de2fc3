"""The translations of a graph: the calls found, grouped into distinct values, each judged.

Two calls are one value only if they translate through the same mapping value with the same
operator (and page size), and their ids are the same value. "The same value" is `Numbering`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.marks import translation_mark
from .numbering import Numbering
from .origins import Origin, Origins
from .schema import bind, history, tensors
from .views import covers, is_part, peel


@dataclass
class Use:
    """One call of a translation op: `steps` over the value's ids are what it translates."""

    call: Node
    steps: tuple[Node, ...]


@dataclass
class TranslatedValue:
    """One value to be translated, for all its uses.

    Attributes:
        op: the translation operator.
        mapping: the tensor that is translated through.
        loc: the ids, the root of every use's steps.
        page_size: the operator's page size, or None where it takes none.
        uses: the calls that this value answers.
        refusal: code and message where the value cannot join the one node.
        answer: name of the node that holds the value, once there is one.
    """

    op: torch._ops.OpOverload
    mapping: Node
    loc: Node
    page_size: int | Node | None
    uses: list[Use] = field(default_factory=list)
    refusal: tuple[str, str] | None = None
    answer: str = ""

    @property
    def operands(self) -> list[Node]:
        size = [self.page_size] if isinstance(self.page_size, Node) else []
        return [self.mapping, self.loc, *size]


def find_calls(graph: Graph) -> list[Node]:
    """Every call of a marked translation op, in graph order."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and translation_mark(node.target) is not None
    ]


def group(calls: list[Node], numbering: Numbering, origins: Origins) -> list[TranslatedValue]:
    """The distinct values behind `calls`, in order of first use, each judged."""
    families: dict[Any, dict[int, TranslatedValue]] = {}
    for call in calls:
        mapping, loc, page_size = operands(call)
        root, steps = _root(call, loc)
        root, mapping = numbering.canonical(root), numbering.canonical(mapping)
        family = (call.target, numbering[mapping], numbering.operand(page_size))
        value = families.setdefault(family, {}).setdefault(
            numbering[root],
            TranslatedValue(call.target, mapping, root, page_size),  # type: ignore[arg-type]
        )
        value.uses.append(Use(call, steps))
    for family_values in families.values():
        _lift_parts(family_values, numbering)
    values = [value for family_values in families.values() for value in family_values.values()]
    for value in values:
        value.refusal = _judge(value, origins)
    return values


def _root(call: Node, loc: Node) -> tuple[Node, tuple[Node, ...]]:
    """The root of the ids that `call` translates, and the steps over it.

    Ours give contiguous int64, whatever the ids are; what another operator gives may follow them.
    """
    if _is_ours(call.target):
        return peel(loc)
    (result,) = tensors(call)
    return peel(loc, casts=False) if result.is_contiguous() else (loc, ())


def _is_ours(op: Any) -> bool:
    return bool(op.namespace == "swa")


def operands(call: Node) -> tuple[Node, Node, Any]:
    """(mapping, loc, page size or None) of a marked translation call."""
    target = call.target
    assert isinstance(target, torch._ops.OpOverload)
    mark = translation_mark(target)
    assert mark is not None
    bound = list(bind(target, call).values())
    page_size = None if mark.page_size is None else bound[mark.page_size]
    return bound[mark.mapping], bound[mark.loc], page_size


def _lift_parts(values: dict[int, TranslatedValue], numbering: Numbering) -> None:
    """Answer parts of a tensor from the translation of the whole, where that is no more work.

    The rule: where the whole is translated anyway, or where its parts together are the whole
    (draft steps, the halves of a batch). Otherwise each part is translated alone, since lanes
    that no call reads may hold ids that no pool has.
    """
    changed = True
    while changed:
        changed = False
        by_parent: dict[int, list[TranslatedValue]] = {}
        for number, value in list(values.items()):
            lineage = _lineage(value, numbering)
            whole = next((n for n, _ in lineage if numbering[n] in values), None)
            if whole is not None:
                _absorb(values, values[numbering[whole]], number, dict(lineage)[whole])
                changed = True
            elif lineage:
                direct: Node = value.loc.args[0]  # type: ignore[assignment]
                by_parent.setdefault(numbering[direct], []).append(value)
        if changed:
            continue
        for parts in by_parent.values():
            parent: Node = parts[0].loc.args[0]  # type: ignore[assignment]
            if covers(parent, [part.loc for part in parts]):
                like = parts[0]
                root = numbering.canonical(peel(parent, casts=_is_ours(like.op))[0])
                values[numbering[root]] = TranslatedValue(
                    like.op, like.mapping, root, like.page_size
                )
                changed = True
                break


def _lineage(value: TranslatedValue, numbering: Numbering) -> list[tuple[Node, tuple[Node, ...]]]:
    """The tensors that the ids are a part of, nearest first, each with the steps down to them."""
    found: list[tuple[Node, tuple[Node, ...]]] = []
    below: tuple[Node, ...] = ()
    node = value.loc
    while is_part(node):
        below = (node, *below)
        root, steps = peel(node.args[0], casts=_is_ours(value.op))  # type: ignore[arg-type]
        below = (*steps, *below)
        node = numbering.canonical(root)
        found.append((node, below))
    return found


def _absorb(
    values: dict[int, TranslatedValue],
    whole: TranslatedValue,
    number: int,
    steps: tuple[Node, ...],
) -> None:
    part = values.pop(number)
    whole.uses += [Use(use.call, (*steps, *use.steps)) for use in part.uses]


def _judge(value: TranslatedValue, origins: Origins) -> tuple[str, str] | None:
    """Why `value` cannot join the one node, as (code, message), or None."""
    mapping, loc = value.mapping, value.loc
    storage = history(mapping)[-1]
    written = origins.touches_written(mapping) | origins.touches_written(loc)
    if storage in origins.written:
        written |= {storage}
    if written:
        names = ", ".join(sorted(node.name for node in written))
        return (
            "MAPPING_WRITTEN",
            f"{names} is written in this forward, so its value before and after the write differ: "
            "translated once per value, right behind its last operand. Edit it between forwards.",
        )
    worst = max(origins[mapping], origins[loc])
    if worst is Origin.IMPURE or worst is Origin.WRITTEN:
        culprit = mapping if origins[mapping] >= origins[loc] else loc
        return (
            "IMPURE_PRODUCER",
            f"'{culprit.name}' comes from an operator that has effects, is random, or is not "
            "known to be pure. Compute it before the forward and pass it in.",
        )
    if origins[mapping] is Origin.ACTIVATION:
        return (
            "MAPPING_FROM_ACTIVATIONS",
            f"the mapping '{mapping.name}' depends on floating-point values that layers compute",
        )
    if origins[loc] is Origin.ACTIVATION:
        return (
            "LOC_FROM_ACTIVATIONS",
            f"the ids '{loc.name}' depend on floating-point values that layers compute",
        )
    return None
