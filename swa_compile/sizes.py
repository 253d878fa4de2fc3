"""Which sizes of a forward change from call to call."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def mark_sizes(*inputs: Any) -> None:
    """Tell Dynamo that dimension 0 of each tensor in `inputs` may have any size, 0 and 1 included.

    By default torch compiles a graph of its own for sizes 0 and 1, and takes two sizes that happen
    to be equal for one. After this call one compilation serves every number of tokens and
    requests: the sizes are unbacked, so nothing can be concluded from the first ones. All other
    dimensions are static: keep the page table's width and the caches as they are.

    Call it on the inputs of every call, or at least of those that may compile::

        swa_compile.mark_sizes(batch)
        compiled(batch)

    Args:
        inputs: tensors, and dataclasses, lists, tuples or dicts of tensors (a `ForwardBatch`).
            What is called `full_to_swa_index_mapping` there is left static.

    Raises:
        TypeError: for anything else.
    """
    for value in inputs:
        for name, tensor in _tensors("", value):
            if tensor.dim() == 0 or name in _STATIC:
                continue
            torch._dynamo.decorators.mark_unbacked(tensor, 0)


# Fields of a batch whose sizes are those of the pool.
_STATIC = frozenset({"full_to_swa_index_mapping"})


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _tensors(str(key), item)]
    if isinstance(value, (list, tuple)):
        return [pair for item in value for pair in _tensors(name, item)]
    if is_dataclass(value):
        return [
            pair
            for field in fields(value)
            for pair in _tensors(field.name, getattr(value, field.name))
        ]
    raise TypeError(f"mark_sizes takes tensors and collections of them; got {type(value).__name__}")
