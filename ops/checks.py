"""Checks of operator inputs: what eager code, fake tensors and every device have in common.

`where` is what a message starts with: "swa::translate_loc: argument 'loc'". Everything that the
metadata of a tensor shows is checked the same way with and without data. Sizes may be symbolic: a
comparison of them becomes a guard or a runtime assertion, never a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .library import define

Size = int | torch.SymInt

INDEX_DTYPES = (torch.int32, torch.int64)

# Stands for "no upper bound" where ids past the end have a meaning of their own.
UNBOUNDED = 2**62


def argument(op: str, name: str) -> str:
    """How messages name an argument: "swa::store_kv: argument 'loc'"."""
    return f"swa::{op}: argument '{name}'"


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise `ValueError` unless `condition` holds; where it is symbolic, record it as a guard."""
    if isinstance(condition, bool):
        if not condition:
            raise ValueError(message())
    else:
        torch._check_value(condition, message)


def require_dtype(where: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise `TypeError` unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise TypeError(f"{where} must be {wanted}, got {dtype_name(tensor.dtype)}")


def require_floating(where: str, tensor: Tensor) -> None:
    """Raise `TypeError` unless `tensor` holds floating-point numbers (float8 included)."""
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{where} must be floating-point, got {dtype_name(tensor.dtype)}")


def require_rank(where: str, tensor: Tensor, rank: int, form: str) -> None:
    """Raise `ValueError` unless `tensor` has `rank` dimensions; `form` names them: "[N, H, D]"."""
    if tensor.dim() != rank:
        raise ValueError(f"{where} must be {rank}-D {form}, got shape {shape_name(tensor)}")


def require_device(where: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise `ValueError` unless `tensor` is on the device of `other`."""
    if tensor.device != other.device:
        raise ValueError(
            f"{where} must be on the device of '{other_name}', {other.device}, got {tensor.device}"
        )


def require_positive(where: str, number: Size) -> None:
    """Raise `ValueError` unless `number` is at least 1."""
    require(number >= 1, lambda: f"{where} must be at least 1, got {size_name(number)}")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")


def shape_name(tensor: Tensor) -> str:
    """The shape as "[4, 2]"."""
    return f"[{', '.join(map(size_name, tensor.shape))}]"


def size_name(size: Size) -> str:
    """A size as its number; a symbolic one as "s46 (62)", with what it stands for in this call."""
    if isinstance(size, torch.SymInt) and size.node.has_hint():
        return f"{size} ({size.node.hint})"
    return str(size)


def is_float8(dtype: torch.dtype) -> bool:
    """True for the 8-bit floating-point types."""
    return dtype.is_floating_point and dtype.itemsize == 1


def checked_ids(ids: Tensor, lower: int, upper: int, where: str) -> Tensor:
    """A fresh contiguous copy of `ids`, after a check that they lie in [lower, upper).

    Raises:
        ValueError: on the CPU, naming the first id outside and its position. Elsewhere the device
            asserts: a message would need a device-to-host synchronization.
    """
    copy = ids.clone(memory_format=torch.contiguous_format)
    if copy.device.type != "cpu":
        inside = (copy >= lower) & (copy < upper)
        torch._assert_async(inside.all(), f"{where} holds ids outside {_range_name(lower, upper)}")
    elif copy.numel():
        lowest, highest = (int(bound) for bound in torch.aminmax(copy))
        if lowest < lower or highest >= upper:
            raise ValueError(_outside(copy, lower, upper, where))
    return copy


def _outside(ids: Tensor, lower: int, upper: int, where: str) -> str:
    position = ((ids < lower) | (ids >= upper)).nonzero()[0].tolist()
    found = int(ids[tuple(position)])
    place = position[0] if len(position) == 1 else tuple(position)
    at = f" at position {place}" if position else ""
    return f"{where} holds {found}{at}; ids must lie in {_range_name(lower, upper)}"


def _range_name(lower: int, upper: int) -> str:
    return f"[{lower}, {'...' if upper >= UNBOUNDED else upper})"


def _fake_check_ids(ids: Tensor, lower: Size, upper: Size, what: str) -> Tensor:
    require_dtype(what, ids, *INDEX_DTYPES)
    return torch.empty(ids.shape, dtype=ids.dtype, device=ids.device)


def _check_ids(ids: Tensor, lower: int, upper: int, what: str) -> Tensor:
    require_dtype(what, ids, *INDEX_DTYPES)
    return checked_ids(ids, lower, upper, what)


# `checked_ids` as an operator, for compiled graphs: the passes put it ahead of lowered gathers.
define(
    "check_ids(Tensor ids, SymInt lower, SymInt upper, str what) -> Tensor",
    fake=_fake_check_ids,
    every=_check_ids,
)
