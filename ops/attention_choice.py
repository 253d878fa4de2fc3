"""Which kernel computes a call of `swa::paged_attention`.

By default our Triton kernels on a CUDA device, SDPA over a gather elsewhere, and the reference
where neither can. An override is the caller's: `with attention_kernel("varlen"):`, which holds for
this thread or task, or the environment variable SWA_COMPILE_ATTENTION, which is read at each call
and holds where there is no such block. What was asked for is what runs: where it cannot, that is an
error with the reason, never another kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention_gather import attention_by_device
from .attention_reference import Keys
from .library import has_triton

VARIABLE = "SWA_COMPILE_ATTENTION"


class AttentionKernel(Protocol):
    """A way to compute the operator."""

    @property
    def name(self) -> str:
        """What messages and overrides call it."""

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on `device` at all; None where it can."""

    def refusal(self, q: Tensor, keys: Keys) -> str | None:
        """Why it cannot compute this call exactly; None where it can."""

    def run(
        self, q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor
    ) -> None:
        """Attention of `q` `[N, H_q, D]` over `keys` into `out`, `[N, H_q, D_v]`, contiguous.

        Gradients may be on: the operator has none, and `out` must not get any.
        """


Bind = Callable[..., Callable[[], None] | None]


@dataclass(frozen=True)
class NamedKernel:
    """A kernel that needs nothing but the call: `AttentionKernel` of three functions.

    `bind` takes the arguments of a call that has run and how to borrow memory, and gives what
    launches it again, in less time than `run`; or None.
    """

    name: str
    missing: Callable[[torch.device], str | None]
    refusal: Callable[[Tensor, Keys], str | None]
    run: Callable[[Tensor, Keys, Tensor, Tensor, Tensor], None]
    bind: Bind | None = None


def _kernel(name: str, missing: Callable[[torch.device], str | None], module: str) -> NamedKernel:
    """Of a module beside this one, imported where it is first asked."""

    @cache
    def functions() -> tuple[Callable[..., str | None], Callable[..., None], Bind | None]:
        found = import_module(module, __package__)
        return found.refusal, found.attention, getattr(found, "bind", None)

    def refusal(q: Tensor, keys: Keys) -> str | None:
        return functions()[0](q, keys)

    def run(q: Tensor, keys: Keys, seq_lens: Tensor, cu_seqlens_q: Tensor, out: Tensor) -> None:
        functions()[1](q, keys, seq_lens, cu_seqlens_q, out)

    def bind(*args: Any) -> Callable[[], None] | None:
        found = functions()[2]
        return None if found is None else found(*args)

    return NamedKernel(name, missing, refusal, run, bind)


def _triton_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    return None if has_triton() else "triton is not installed"


def _varlen_missing(device: torch.device) -> str | None:
    reason: str | None = import_module(".attention_varlen", __package__).missing(device)
    return reason


def _flashinfer_missing(device: torch.device) -> str | None:
    reason: str | None = import_module(".attention_flashinfer", __package__).missing(device)
    return reason


def _flashinfer_refusal(q: Tensor, keys: Keys) -> str:
    return "it runs by a plan: use `with attention_kernel(FlashInferAttention(...)):` around"


def _everywhere(device: torch.device) -> None:
    return None


def _always(q: Tensor, keys: Keys) -> None:
    return None


def _unreachable(q: Tensor, keys: Keys, lens: Tensor, starts: Tensor, out: Tensor) -> None:
    raise AssertionError("refused")


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _kernel("triton", _triton_missing, ".attention_launch"),
        NamedKernel("flashinfer", _flashinfer_missing, _flashinfer_refusal, _unreachable),
        _kernel("varlen", _varlen_missing, ".attention_varlen"),
        _kernel("sdpa", _everywhere, ".attention_sdpa"),
        NamedKernel("reference", _everywhere, _always, attention_by_device),
    )
}

# In the order in which they are tried where nothing is asked for; the last takes every call.
_BY_DEFAULT = tuple(KERNELS[name] for name in ("triton", "sdpa", "reference"))

_asked: ContextVar[AttentionKernel | None] = ContextVar("swa_attention_kernel", default=None)


@contextmanager
def attention_kernel(kernel: str | AttentionKernel) -> Iterator[None]:
    """Have calls of `paged_attention` inside the block computed by `kernel`.

    It holds for eager code and for the operator inside compiled code that is called in the block,
    in this thread or task; a CUDA graph keeps what it was captured with. Not for use inside
    compiled code.

    Args:
        kernel: "triton", "varlen", "sdpa" or "reference", or an object with the methods of
            `AttentionKernel`, a planned `FlashInferAttention` for instance.

    Raises:
        ValueError: there is no such kernel. A call that it cannot compute is a ValueError, too.
    """
    token = _asked.set(_named(kernel, "attention_kernel") if isinstance(kernel, str) else kernel)
    try:
        yield
    finally:
        _asked.reset(token)


def _named(name: str, source: str) -> NamedKernel:
    if name not in KERNELS:
        raise ValueError(f"{source}: there is no kernel '{name}', only {', '.join(KERNELS)}")
    return KERNELS[name]


def asked() -> tuple[AttentionKernel | None, str]:
    """The override in force: the block's, and the environment variable, "" where it is unset.

    While it is the same, so is the choice for the same call.
    """
    return _asked.get(), os.environ.get(VARIABLE, "")


def choose(q: Tensor, keys: Keys) -> AttentionKernel:
    """The kernel for a call whose metadata has been checked.

    Raises:
        ValueError: the one that was asked for cannot compute it.
    """
    wanted, name = asked()
    source = "attention_kernel"
    if wanted is None and name:
        wanted, source = _named(name, VARIABLE), VARIABLE
    if wanted is not None:
        reason = wanted.missing(q.device) or wanted.refusal(q, keys)
        if reason is None:
            return wanted
        raise ValueError(
            f"swa::paged_attention: kernel '{wanted.name}', asked for by {source}, cannot compute "
            f"this call: {reason}"
        )
    for kernel in _BY_DEFAULT:
        if kernel.missing(q.device) is None and kernel.refusal(q, keys) is None:
            return kernel
    raise AssertionError("the reference takes every call")
