"""The operator library "swa": every operator of this package is defined and implemented on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

# The registrations live as long as this object does.
_LIBRARY = torch.library.Library("swa", "DEF")

# Inductor may otherwise hand an operator a copy in a layout of its choice; caches are written in
# place through whatever strides they came with.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Kernel = Callable[..., Any]


def define(
    schema: str, *, fake: Kernel, every: Kernel | None = None, **kernels: Kernel
) -> torch._ops.OpOverload:
    """Define an operator on the library "swa".

    Args:
        schema: name, arguments and returns, as `torch.library.Library.define` takes them.
        fake: what it gives for tensors without data, with the same checks as the kernels.
        every: the kernel for all devices that `kernels` does not name.
        kernels: a kernel per dispatch key ("CPU", "CUDA").
    """
    _LIBRARY.define(schema, tags=_TAGS)
    name = schema.partition("(")[0]  # with its overload, unlike what Library.define returns
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.swa, base), overload or "default")
    assert isinstance(op, torch._ops.OpOverload)
    if every is not None:
        _LIBRARY.impl(name, _without_none(op, every), "CompositeExplicitAutograd")
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, _without_none(op, kernel), key)
    torch.library.register_fake(f"swa::{name}", _without_none(op, fake), lib=_LIBRARY)
    return op


def _without_none(op: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """`kernel` behind a check that torch does not make: None passes for a `Tensor` argument."""
    base = op._schema.name
    wanted = [
        (i, arg.name)
        for i, arg in enumerate(op._schema.arguments)
        if isinstance(arg.type, torch.TensorType) and not arg.kwarg_only
    ]

    @wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for i, name in wanted:
            if i < len(args) and args[i] is None:
                raise TypeError(f"{base}: argument '{name}' must be a tensor, got None")
        return kernel(*args, **kwargs)

    return checked


@cache
def has_triton() -> bool:
    """Whether Triton is installed; its modules are imported where a GPU first needs them."""
    return importlib.util.find_spec("triton") is not None
