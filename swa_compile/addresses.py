"""At which addresses a recording reads its inputs, and whether they are there.

A CUDA graph reads and writes fixed addresses. An input is either *bound*, so that the graph uses
the caller's memory and may be repeated only while the input is there, or *owned*: the graph reads a
buffer of its own, and the input is copied there first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Copying more than this costs more than a kernel launch.
LARGE = 1 << 20

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def layout(tensor: Tensor) -> Layout:
    """What a recording has fixed of a tensor beside its address."""
    return tensor.shape, tensor.stride(), tensor.dtype


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sharing(tensors: dict[int, Tensor], written: set[int]) -> set[int]:
    """The places of `tensors` that lie in the storage of a written one, these included."""
    storages = {
        tensors[place].untyped_storage().data_ptr() for place in written if place in tensors
    }
    return {
        place
        for place, tensor in tensors.items()
        if tensor.untyped_storage().data_ptr() in storages
    }


class Placement:
    """Where a recording finds its tensors.

    Args:
        bound: place -> tensor used at its own address. No reference to it is kept: the address of
            the tensor that a call brings tells whether it is the same memory.
        owned: place -> tensor that a buffer is made for.
    """

    def __init__(self, bound: dict[int, Tensor], owned: dict[int, Tensor]) -> None:
        self.places = tuple(bound)
        self.addresses = [tensor.data_ptr() for tensor in bound.values()]
        with torch.inference_mode(False):  # they are filled inside and outside of that mode
            self.buffers = {place: _like(tensor) for place, tensor in owned.items()}

    def moved(self, values: Sequence[Any]) -> list[int]:
        """The bound places that `values` has at another address now."""
        now = [values[place].data_ptr() for place in self.places]
        if now == self.addresses:
            return []
        return [
            place
            for place, is_at, was_at in zip(self.places, now, self.addresses, strict=True)
            if is_at != was_at
        ]

    def aligned(self) -> bool:
        """Whether Inductor's code takes the bound tensors as they are: it aligns to 16 bytes."""
        return all(address % 16 == 0 for address in self.addresses)

    def fill(self, values: list[Any]) -> int:
        """Put the buffers in place of the owned `values`, filled with them: how many were copied.

        A value that is in its buffer already, because the caller was given it, is not copied.
        """
        if not self.buffers:
            return 0
        pairs = []
        for place, buffer in self.buffers.items():
            value = values[place]
            if value.data_ptr() != buffer.data_ptr():
                pairs.append((_distinct(buffer), _distinct(value)))
            values[place] = buffer
        copy_all(pairs)
        return len(pairs)


@dataclass(frozen=True)
class Output:
    """What a recording keeps of something that was returned while it was made.

    Attributes:
        place: of the input that it is, or in whose storage it lies; else None.
        view: (shape, strides, distance from the input in elements) of such a view, or None.
        value: anything else.
    """

    place: int | None = None
    view: tuple[torch.Size, tuple[int, ...], int] | None = None
    value: Any = None

    @classmethod
    def keep(cls, out: Any, inputs: Sequence[Any], borrow: Callable[[Tensor], Tensor]) -> Output:
        """`out`, which was returned for `inputs`."""
        if not isinstance(out, Tensor):
            return cls(value=out)
        for place, value in enumerate(inputs):
            if out is value:
                return cls(place)
        # The memory of an input belongs to whoever brings it at a replay.
        storage = out.untyped_storage().data_ptr()
        for place, value in enumerate(inputs):
            if (
                isinstance(value, Tensor)
                and value.untyped_storage().data_ptr() == storage
                and value.dtype is out.dtype
                and _same_bits(value, out)
                and storage
            ):
                away = int(out.storage_offset()) - int(value.storage_offset())
                return cls(place, (out.shape, out.stride(), away))
        return cls(value=_read_as(out, borrow(out)))

    def of(self, inputs: Sequence[Any]) -> Any:
        """The same of a call with `inputs`."""
        if self.place is None:
            return self.value
        value = inputs[self.place]
        if self.view is None:
            return value
        shape, strides, away = self.view
        return value.as_strided(shape, strides, value.storage_offset() + away)


def keep_all(
    outputs: Sequence[Any], inputs: Sequence[Any], borrow: Callable[[Tensor], Tensor]
) -> list[Output]:
    """`Output.keep` of each of `outputs`; what is returned twice stays one thing."""
    kept: dict[int, Output] = {}
    for out in outputs:
        if id(out) not in kept:
            kept[id(out)] = Output.keep(out, inputs, borrow)
    return [kept[id(out)] for out in outputs]


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (target, source) pairs with one launch for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_dtype.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


def independent(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors` that share memory with each other as those do, and with nothing else.

    A tensor that is there twice has one copy. Sizes, strides and storage offsets stay: AOTAutograd
    makes an output that is a view of an input anew, from those of what the code returned.
    """
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        # All empty memory has one address, on whatever device.
        key = tensor.untyped_storage().data_ptr() or -id(tensor)
        groups.setdefault(key, {})[id(tensor)] = tensor
    copies: dict[int, Tensor] = {}
    for group in groups.values():
        first = next(iter(group.values()))
        if len(group) == 1 and not first.storage_offset():
            copies[id(first)] = _like(first)
        else:
            size = max(map(_end, group.values()))
            memory = torch.empty(size, dtype=torch.uint8, device=first.device)
            copies.update((i, _at_its_place(tensor, memory)) for i, tensor in group.items())
        for i, tensor in group.items():
            _distinct(copies[i]).copy_(_distinct(tensor))
    return [copies[id(tensor)] for tensor in tensors]


def _end(tensor: Tensor) -> int:
    """Bytes from the start of the storage of `tensor` to its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _at_its_place(tensor: Tensor, memory: Tensor) -> Tensor:
    """A tensor in `memory` as `tensor` lies in its own."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return _read_as(tensor, made)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether torch reads both alike: it conjugates and negates lazily, by a bit of the tensor."""
    return one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


def _read_as(tensor: Tensor, made: Tensor) -> Tensor:
    """`made` with those bits of `tensor`."""
    if tensor.is_conj() != made.is_conj():
        made = made.conj()
    if tensor.is_neg() != made.is_neg():
        made = torch._neg_view(made)
    return made


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _distinct(tensor: Tensor) -> Tensor:
    """`tensor` with each element once: torch refuses to write to an expanded dimension."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
