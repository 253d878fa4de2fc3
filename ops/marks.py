"""Which operators are translations and which are KV stores: what the passes know of an operator.

Ours are marked where they are defined, an engine's own by its author. Everything else that the
passes have to know stands in the operator's schema, and a mark that the schema contradicts is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

OpOverload = torch._ops.OpOverload


@dataclass(frozen=True)
class TranslationMark:
    """An operator that is pure and element-wise over its ids.

    Attributes:
        op: qualified name, "ns::op" or "ns::op.overload".
        mapping, loc: positions of the mapping and of the ids among the operator's arguments.
        page_size: position of the page size, or None where the operator takes none.
    """

    op: str
    mapping: int
    loc: int
    page_size: int | None


@dataclass(frozen=True)
class StoreMark:
    """An operator that writes rows of caches, row `loc[i]` from its i-th token.

    Attributes:
        op: qualified name, "ns::op" or "ns::op.overload".
        caches: positions of the written caches among the operator's arguments.
        loc: position of the row ids.
    """

    op: str
    caches: tuple[int, ...]
    loc: int


_MARKS: dict[str, TranslationMark | StoreMark] = {}


def mark_translation(op: str | OpOverload, mapping: int = 0, loc: int = 1) -> None:
    """Have the passes treat `op` as a translation: merge its calls and move them to the prologue.

    The schema shows that it writes nothing; that its result depends on nothing but its arguments,
    element by element over `loc` (so that it commutes with views of `loc`), is the caller's word.

    Args:
        op: "ns::op", "ns::op.overload" or an operator overload. Besides `mapping` and `loc` it may
            take one int, the page size. It returns one fresh tensor.
        mapping, loc: positions of the two tensors among its arguments.

    Raises:
        ValueError: there is no such operator, its schema disagrees, or it is marked otherwise.
        TypeError: `op` is no operator name, or a position is not an int.
    """
    found = resolve(op)
    arguments, where = found._schema.arguments, f"mark_translation: {found.name()}"
    if found._schema.is_mutable:
        written = next(arg.name for arg in arguments if _is_written(arg))
        raise ValueError(f"{where}: argument '{written}' is written; a translation writes nothing")
    returns = found._schema.returns
    if len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType):
        given = ", ".join(str(ret.type) for ret in returns) or "nothing"
        raise ValueError(f"{where} must return one Tensor, returns {given}")
    if returns[0].alias_info is not None:
        raise ValueError(f"{where} returns a view of an argument; a translation is a fresh tensor")
    for name, position in (("mapping", mapping), ("loc", loc)):
        _tensor_argument(where, arguments, name, position)
    if mapping == loc:
        raise ValueError(f"{where}: mapping and loc are both argument {loc}")
    rest = [i for i in range(len(arguments)) if i not in (mapping, loc)]
    for i in rest:
        if not isinstance(arguments[i].type, torch.IntType):
            raise ValueError(
                f"{where}: argument '{arguments[i].name}' is {arguments[i].type}; besides mapping "
                "and loc a translation takes at most an int, the page size"
            )
    if len(rest) > 1:
        names = ", ".join(f"'{arguments[i].name}'" for i in rest)
        raise ValueError(f"{where}: of the ints {names} only one can be the page size")
    for arg in arguments:
        if arg.kwarg_only:
            raise ValueError(f"{where}: argument '{arg.name}' must not be keyword-only")
    _add(TranslationMark(found.name(), mapping, loc, rest[0] if rest else None))


def mark_store(op: str | OpOverload, caches: Iterable[int] = (0, 1), loc: int = 4) -> None:
    """Have the passes treat `op` as a KV store.

    Args:
        op: "ns::op", "ns::op.overload" or an operator overload that returns nothing.
        caches: positions of the caches: the tensors, and the only ones, that its schema writes.
        loc: position of the tensor of row ids.

    Raises:
        ValueError: there is no such operator, its schema disagrees, or it is marked otherwise.
        TypeError: `op` is no operator name, or a position is not an int.
    """
    found = resolve(op)
    arguments, where = found._schema.arguments, f"mark_store: {found.name()}"
    caches = tuple(caches)
    if not caches:
        raise ValueError(f"{where}: a store writes at least one cache")
    for position in caches:
        arg = _tensor_argument(where, arguments, "caches", position)
        if not _is_written(arg):
            raise ValueError(
                f"{where}: argument '{arg.name}' is a cache, but its schema does not declare the "
                "write; declare it as Tensor(a!)"
            )
    arg = _tensor_argument(where, arguments, "loc", loc)
    if _is_written(arg):
        raise ValueError(f"{where}: argument '{arg.name}' is loc, but the operator writes it")
    for i, arg in enumerate(arguments):
        if _is_written(arg) and i not in caches:
            raise ValueError(f"{where}: argument '{arg.name}' is written but is no cache")
    if found._schema.returns:
        raise ValueError(f"{where} must return nothing")
    _add(StoreMark(found.name(), caches, loc))


def translation_mark(op: object) -> TranslationMark | None:
    """The mark of an operator overload that is a translation, else None."""
    mark = _MARKS.get(op.name()) if isinstance(op, OpOverload) else None
    return mark if isinstance(mark, TranslationMark) else None


def store_mark(op: object) -> StoreMark | None:
    """The mark of an operator overload that is a store, else None."""
    mark = _MARKS.get(op.name()) if isinstance(op, OpOverload) else None
    return mark if isinstance(mark, StoreMark) else None


def named_call(
    kind: str, mapping: Any, loc: Any, page_size: Any
) -> tuple[OpOverload, tuple[Any, ...]]:
    """The marked translation `kind` and its arguments in schema order, to be called as op(*args).

    `page_size` is left out where the operator takes none.
    """
    op = resolve(kind)
    mark = translation_mark(op)
    if mark is None:
        raise ValueError(f"{kind} is not marked as a translation; see mark_translation")
    by_position = {mark.mapping: mapping, mark.loc: loc}
    if mark.page_size is not None:
        by_position[mark.page_size] = page_size
    return op, tuple(by_position[i] for i in sorted(by_position))


def describe() -> list[str]:
    """One line per mark, with the operator's schema: what compiled code depends on."""
    lines = []
    for name, mark in sorted(_MARKS.items()):
        try:
            lines.append(f"{mark} {resolve(name)._schema}")
        except ValueError:
            continue  # it went away with its library, and so from every graph
    return lines


def resolve(op: str | OpOverload) -> OpOverload:
    """The operator overload that `op` names: "ns::op", "ns::op.overload" or the overload itself.

    A name without overload means the default overload, or the only one.
    """
    if isinstance(op, OpOverload):
        return op
    if not isinstance(op, str):
        raise TypeError(f"an operator is named as 'ns::op', got {type(op).__name__}")
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    if not namespace or not name:
        raise ValueError(f"an operator is named as 'ns::op', got {op!r}")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except AttributeError:
        raise ValueError(
            f"there is no operator {op!r}; is the module that defines it imported?"
        ) from None
    overloads = packet.overloads()
    if not overload:
        overload = overloads[0] if len(overloads) == 1 else "default"
    if overload not in overloads:
        raise ValueError(f"{op!r} has the overloads {', '.join(overloads)}; name one of them")
    found = getattr(packet, overload)
    assert isinstance(found, OpOverload)
    return found


def _add(mark: TranslationMark | StoreMark) -> None:
    present = _MARKS.setdefault(mark.op, mark)
    if present != mark:
        raise ValueError(f"{mark.op} is marked already, as {present}; got {mark}")


def _tensor_argument(where: str, arguments: list[Any], role: str, position: int) -> Any:
    if not isinstance(position, int) or isinstance(position, bool):
        raise TypeError(f"{where}: {role} is the position of an argument, got {position!r}")
    if not 0 <= position < len(arguments):
        raise ValueError(f"{where} has {len(arguments)} arguments; {role} cannot be {position}")
    arg = arguments[position]
    if not isinstance(arg.type, torch.TensorType):
        raise ValueError(f"{where}: argument '{arg.name}' ({role}) must be a Tensor, is {arg.type}")
    return arg


def _is_written(arg: Any) -> bool:
    return arg.alias_info is not None and arg.alias_info.is_write
