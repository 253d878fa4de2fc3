"""A row program as one Triton kernel: a program per token and block of heads.

Imported only where a GPU needs it.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import is_float8
from .row_program import read
from .row_source import DTYPES, source_of
from .triton_launch import FixedKernel

_WARPS = 2


def run(text: str, written: Sequence[Tensor], inputs: Sequence[Tensor], tokens: int) -> None:
    """Write each output of the program for `tokens` tokens, in one launch.

    A slot out of range stops the device and is written nowhere.
    """
    if not tokens:
        return
    # A stride that no address uses may depend on the number of tokens: [1, heads, tokens, dim].
    key = tuple(
        (tensor.dtype, *(s if d in used else 0 for d, s in enumerate(tensor.stride())))
        for tensor, used in zip((*written, *inputs), _used(text, len(written)), strict=True)
    )
    rows = tuple([w.shape[dim] for w, dim in zip(written, _row_dims(text), strict=True)])
    kernel, blocks = _fixed(text, key, rows)
    kernel((tokens, blocks, 1), *written, *inputs)


@lru_cache(maxsize=4096)
def _fixed(text: str, key: tuple[Any, ...], rows: tuple[int, ...]) -> tuple[FixedKernel, int]:
    kernel, blocks = _kernel(text, key, len(rows))
    return FixedKernel(kernel, rows, num_warps=_WARPS), blocks


@cache
def _used(text: str, written: int) -> list[set[int]]:
    """Which dimensions of each written tensor and of each input have places but 0."""
    found: dict[int, set[int]] = {}

    def use(number: int, places: list[Any]) -> None:
        found.setdefault(number, set()).update(d for d, p in enumerate(places) if p != 0)

    for output in read(text):
        use(output["target"], output["place"])
        if output["slots"] is not None:
            use(written + output["slots"], [["token"]])
        for kind, *rest in output["steps"]:
            if kind == "load":
                use(written + rest[0], rest[1])
    return [found[number] for number in sorted(found)]


@cache
def _row_dims(text: str) -> list[int]:
    """The dimension of each written tensor that is indexed by token or slot."""
    dims: dict[int, int] = {}
    for output in read(text):
        dims[output["target"]] = next(
            i for i, place in enumerate(output["place"]) if place in (["slot"], ["token"])
        )
    return [dims[target] for target in sorted(dims)]


@cache
def _kernel(text: str, key: tuple[Any, ...], written: int) -> tuple[Any, int]:
    """The kernel for tensors of these dtypes and strides, and its blocks per token."""
    source, blocks = source_of(text, [k[0] for k in key], [k[1:] for k in key], written)
    name = f"<swa row kernel {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Triton reads a kernel's source back through inspect.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, name, "exec"), module)
    return module["rows"], blocks


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel here can write `dtype`."""
    if str(dtype).removeprefix("torch.") not in DTYPES:
        return False
    if not is_float8(dtype):
        return True
    if torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
