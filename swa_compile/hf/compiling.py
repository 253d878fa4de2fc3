"""How forwards of models are compiled: whole, once for every number of tokens and requests."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from swa_compile.kv import ForwardBatch

# Sizes of 0 and 1 are compiled apart from others, so smaller batches are padded.
LEAST = 2


def compiles(backend: Any) -> bool:
    """Whether `backend` is one of torch.compile; None and "eager" compile nothing."""
    return backend not in (None, "eager")


def compile_apart(
    function: Callable[..., Any], backend: Any, options: dict[str, Any] | None
) -> Callable[..., Any]:
    """`function`, compiled by `backend`; as it is where that compiles nothing.

    Raises:
        ValueError: there are options, and nothing is compiled.
    """
    if not compiles(backend):
        if options:
            raise ValueError(f"backend={backend!r} compiles nothing and takes no options")
        return function
    assert isinstance(function, FunctionType)
    # Dynamo keeps compiled code by code object and gives up after a few: each caller has a code
    # object of its own. Sizes are marked, and nothing else is dynamic: what another forward was
    # called with is no reason to make a pool's size symbolic.
    own = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own, backend=backend, options=options, fullgraph=True, dynamic=False)


def mark_dynamic(batch: ForwardBatch) -> None:
    """One graph serves every number of tokens and requests from `LEAST` on.

    With `swa_compile.mark_sizes` nothing at all would be known of the sizes, which some models do
    not compile with (DeepSeek V4's reshapes, Gemma 3n's products in Inductor).
    """
    mark_rows(*(t for name, t in vars(batch).items() if name != "full_to_swa_index_mapping"))


def mark_rows(*tensors: Tensor) -> None:
    """Dimension 0 of each may have any size from `LEAST` on."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
