"""Launching a Triton kernel again in a few microseconds.

Triton looks at every argument of every launch to find the compiled form of a kernel, which takes
longer than the launch. Between captured pieces of a forward that time is the step's. Here all that
is no tensor is fixed beforehand, so that what is left to look at is what may differ between
tensors: dtype and alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor


class FixedKernel:
    """A kernel that `triton.jit` made, with its arguments behind the tensors.

    Args:
        kernel: takes tensors first, then everything else.
        constants: everything else, in order.
        options: of the compilation (`num_warps`, ...).
    """

    def __init__(self, kernel: Any, constants: Sequence[Any], **options: Any) -> None:
        self._kernel, self._constants, self._options = kernel, tuple(constants), options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *tensors: Tensor | None) -> None:
        """Launch on the current device and stream; the first tensor is none that is left out."""
        key = _kind(tensors)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *self._constants)
            return
        compiled = self._kernel[grid](*tensors, *self._constants, **self._options)
        if compiled is not None:  # the interpreter gives none
            self._compiled[key] = compiled

    def bound(self, grid: tuple[int, int, int], *tensors: Tensor | None) -> Callable[[], None]:
        """What launches with these arguments, in about the time that the driver takes."""
        compiled = self._compiled.get(_kind(tensors))
        if compiled is None:  # not launched yet, or interpreted
            return partial(self, grid, *tensors)
        return partial(compiled[grid], *tensors, *self._constants)


def _kind(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What decides which compiled form a call takes."""
    return (
        tensors[0].device.index,  # type: ignore[union-attr]
        *[None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors],
    )
