"""Models that look positions up: past the end of a table there is nothing to compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Positions of the probing tokens, which are all one id. So far apart that an index which numbers
# tokens or experts is not taken for one of them.
PLACES = (0, 5, 11)

_aten = torch.ops.aten


class TableLengths(TorchDispatchMode):
    """Inside the block, how many positions each table has that is indexed by `PLACES`.

    GPT-2 and OPT learn a row for each position (OPT's begin at row 2), GPT-J computes its rows
    ahead: no name or type is common to them, an index that rises with the position is. Past the
    end it is an IndexError, compiled for a CPU the end of the process, and on a GPU an assertion
    that leaves the device unusable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        lookups = _LOOKUPS.get(func)
        if lookups is not None:
            for rows, index in lookups(*args):
                first = _first_row(index)
                if first is not None:
                    self.found.append(rows - first)
        return func(*args, **(kwargs or {}))

    @property
    def shortest(self) -> int | None:
        """Positions that all of them have; None where no position is looked up."""
        return min(self.found, default=None)


# (rows of the table, index into them), for each table that a call reads.
_Lookups = Iterator[tuple[int, Tensor]]


def _embedding(weight: Tensor, index: Tensor, *rest: Any) -> _Lookups:
    yield weight.shape[0], index


def _along(table: Tensor, dim: int, index: Tensor, *rest: Any) -> _Lookups:
    yield table.shape[dim], index


def _index(table: Tensor, indices: list[Tensor | None]) -> _Lookups:
    for dim, index in enumerate(indices):
        if index is not None and index.dtype != torch.bool:
            yield table.shape[dim], index


_LOOKUPS: dict[Any, Callable[..., _Lookups]] = {
    _aten.embedding.default: _embedding,
    _aten.gather.default: _along,
    _aten.index_select.default: _along,
    _aten.index.Tensor: _index,
}


def _first_row(index: Tensor) -> int | None:
    """The row of position 0, where `index` names the rows of `PLACES`; else None."""
    places = torch.tensor(PLACES, device=index.device)
    for dim, size in enumerate(index.shape):
        if size == len(PLACES):
            rows = index.movedim(dim, 0).reshape(size, -1)
            if rows.numel() and bool((rows == rows[0, 0] + places[:, None]).all()):
                return int(rows[0, 0])
    return None
