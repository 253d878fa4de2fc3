"""A cache argument that is a view of a larger tensor, as an index into that tensor.

Engines stack caches: `k[i]` of `[L, S, H, D]`, `kv[0]` of `[2, S, H, D]`, `kv[:, 0]` of
`[S, 2, H, D]`. After functionalization a store into such a view is a store into the base, and
`base[i, loc] = k` says the same without a copy of the view.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import sympy
import torch
from torch.fx import Node

from .emit import Emitter, same_layout, same_size, size_of
from .lower import constant
from .schema import View, history, tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class RowIndex:
    """Which dimension of the base holds the rows, and at which position the others are fixed.

    Attributes:
        row_dim: the base's dimension that `loc` indexes.
        first_row: the row of the base that is row 0 of the view.
        count: rows of the view, or None for all of the base's.
        fixed: (dimension, position) of each dimension that the view selected from.
    """

    row_dim: int = 0
    first_row: int = 0
    count: int | None = None
    fixed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, view: View) -> RowIndex | None:
        """The index form of `view`, or None where none is known to be right.

        torch describes a view by the strides and the offset that its base had when the forward
        began. So the form is only taken where nothing on the way from there has another layout.
        """
        (base,) = tensors(view.base)
        if not all(_same_place(base, tensors(node)[0]) for node in history(view.base)):
            return None
        if view.kind == "whole":
            return cls()
        if view.kind == "slice":
            return cls._of_slice(base, *view.where)
        if view.kind == "strided":
            return cls._of_selection(base, *view.where)
        return None

    @classmethod
    def _of_slice(cls, base: torch.Tensor, dim: int, start: Any, end: Any) -> RowIndex | None:
        start, end = size_of(start), size_of(end)
        # torch computes `start` from the view's offset in the storage and forgets that the base
        # may begin further in.
        ahead, rest = _divide(size_of(base.storage_offset()), size_of(base.stride(0)))
        known = isinstance(start, int) and isinstance(end, int)
        if dim != 0 or ahead is None or rest != 0 or not known:
            return None
        return cls(first_row=start - ahead, count=end - start)

    @classmethod
    def _of_selection(
        cls, base: torch.Tensor, size: tuple[Any, ...], stride: tuple[Any, ...], offset: Any
    ) -> RowIndex | None:
        """A view that keeps some dimensions whole and stands at one position in the others."""
        if not size:
            return None
        for kept in combinations(range(base.dim()), len(size)):
            same = all(
                same_size(size[i], base.shape[dim]) and same_size(stride[i], base.stride(dim))
                for i, dim in enumerate(kept)
            )
            if not same:
                continue
            rest = [dim for dim in range(base.dim()) if dim not in kept]
            away = size_of(offset) - size_of(base.storage_offset())
            # From the outermost dimension inwards: what one leaves over the next takes up.
            rest.sort(key=lambda dim: -_hint(base.stride(dim)))
            fixed = _positions(away, [(dim, base.shape[dim], base.stride(dim)) for dim in rest])
            if fixed is not None:
                return cls(row_dim=kept[0], fixed=fixed)
        return None

    def rows(self, view: View, emit: Emitter) -> int | Node:
        """How many rows the view has."""
        if self.count is not None:
            return self.count
        root = history(view.base)[-1]  # of the same layout, and there from the start
        extent = tensors(root)[0].shape[self.row_dim]
        if isinstance(extent, int):
            return extent
        return emit.call(aten.sym_size.int, root, self.row_dim)

    def tensors(self, slots: Node, emit: Emitter) -> list[Node | None]:
        """The index list for `index_put` on the base."""
        if self.first_row:
            slots = emit.call(aten.add.Tensor, slots, self.first_row, like=slots)
        index: list[Node | None] = [None] * (max([self.row_dim, *(d for d, _ in self.fixed)]) + 1)
        index[self.row_dim] = slots
        for dim, position in self.fixed:
            index[dim] = constant(position, slots, emit)
        return index


def _hint(size: Any) -> int:
    """The value of a size in this compilation, to order by; 0 where it has none yet."""
    value = size if isinstance(size, int) else size.node.hint
    return 0 if value is None else int(value)


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_layout(a, b) and same_size(a.storage_offset(), b.storage_offset())


def _positions(away: Any, dims: list[tuple[int, Any, Any]]) -> tuple[tuple[int, int], ...] | None:
    """The position in each of `dims` (dimension, size, stride) that stands `away` elements in."""
    fixed = []
    for dim, size, stride in dims:
        count, step = size_of(size), size_of(stride)
        position, away = _divide(away, step)
        if position is None or position < 0 or (isinstance(count, int) and position >= count):
            return None
        fixed.append((dim, position))
    return tuple(fixed) if away == 0 else None


def _divide(a: Any, b: Any) -> tuple[int | None, Any]:
    """(whole quotient, remainder) of sizes; (None, a) where there is none for all their values."""
    if b == 0:
        return 0, a
    if isinstance(a, int) and isinstance(b, int):
        return divmod(a, b)
    # i * stride0 + j * stride1 over stride0 is i + j / size1: the constant is the quotient.
    quotient, rest = sympy.expand(sympy.sympify(a) / sympy.sympify(b)).as_coeff_Add()
    return (int(quotient), sympy.expand(rest * b)) if quotient.is_Integer else (None, a)
