"""Between the host's lists and tensors on the device, without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values`, which may be nested, as a tensor on `device`."""
    # The caller's default device, if one is set, is not where the host's lists are.
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def lists_on_device(
    lists: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Each of `lists` as a tensor on `device`; all are views of one, which one copy brings there.

    On a GPU a copy costs the host some 30 us, however small it is.
    """
    whole = on_device(list(chain.from_iterable(lists)), dtype, device)
    return whole.split(list(map(len, lists)))


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor of the host."""
    if device.type != "cuda":  # no other kind is known to have pinned memory
        return host.to(device)
    # From pinned memory the copy runs on the stream and the host does not wait for it.
    return host.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A tensor on its way to the host, which waits for it no earlier than it reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._host.tolist()
        return values
