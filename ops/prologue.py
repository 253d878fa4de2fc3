"""The operators that only the passes put into graphs; nobody calls them in a model.

`translate_many` is the one node that all translations of a forward become, `materialize` marks a
value that Inductor must compute once and keep, `materialize_all` several of them that one kernel
shall compute, `fresh` is a copy that must remain one: Inductor
takes clones away, and then two outputs of a graph may share storage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import Size
from .library import define
from .marks import named_call


def _translate_many(
    mappings: list[Tensor], locs: list[Tensor], kinds: list[str], page_sizes: list[Size]
) -> list[Tensor]:
    """Call the translation `kinds[i]` on the i-th operands; page size 0 where it takes none."""
    counts = [len(mappings), len(locs), len(kinds), len(page_sizes)]
    if len(set(counts)) != 1:
        raise ValueError(f"swa::translate_many: lists of one length wanted, got {counts}")
    results = []
    for kind, mapping, loc, page_size in zip(kinds, mappings, locs, page_sizes, strict=True):
        op, args = named_call(kind, mapping, loc, page_size)
        results.append(op(*args))
    return results


def _materialize(value: Tensor) -> Tensor:
    return torch.clone(value)


def _materialize_all(values: list[Tensor]) -> list[Tensor]:
    return [torch.clone(value) for value in values]


define(
    "translate_many(Tensor[] mappings, Tensor[] locs, str[] kinds, SymInt[] page_sizes)"
    " -> Tensor[]",
    fake=_translate_many,
    every=_translate_many,
)
define("materialize(Tensor value) -> Tensor", fake=_materialize, every=_materialize)
define(
    "materialize_all(Tensor[] values) -> Tensor[]",
    fake=_materialize_all,
    every=_materialize_all,
)
define("fresh(Tensor value) -> Tensor", fake=_materialize, every=_materialize)
