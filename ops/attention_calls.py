"""Hearing the calls of `swa::paged_attention`, so as to launch them again without the operator.

A dispatched call looks at its arguments, chooses a kernel and its sizes, and allocates. Where the
addresses are known to stay, between the captured pieces of a forward, all of it gives the same each
time, and takes longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from torch import Tensor

from .attention_choice import AttentionKernel, NamedKernel
from .attention_reference import Keys

Launch = Callable[[], None]
Borrow = Callable[[Tensor], Tensor]

_listener: ContextVar[tuple[Callable[[Launch], None], Borrow] | None] = ContextVar(
    "swa_attention_listener", default=None
)


@contextmanager
def heard_attention(hear: Callable[[Launch], None], borrow: Borrow) -> Iterator[None]:
    """Have `hear` given each call inside the block that launches a kernel, when it has.

    What it is given launches the same kernel with the same arguments on the same memory, the
    result's included, on the stream that is current by then. That holds as long as the memory does,
    and `attention_choice.asked` says the same.

    Args:
        borrow: makes of a tensor one on the same memory that does not keep it from being freed.
    """
    token = _listener.set((hear, borrow))
    try:
        yield
    finally:
        _listener.reset(token)


def tell(
    kernel: AttentionKernel,
    q: Tensor,
    keys: Keys,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
) -> None:
    """Say that `kernel.run` has been called with these arguments."""
    listener = _listener.get()
    if listener is None:
        return
    hear, borrow = listener
    q, seq_lens, cu_seqlens_q, out = map(borrow, (q, seq_lens, cu_seqlens_q, out))
    keys = keys._replace(
        k_cache=borrow(keys.k_cache),
        v_cache=borrow(keys.v_cache),
        page_table=borrow(keys.page_table),
        sinks=None if keys.sinks is None else borrow(keys.sinks),
    )
    bind = kernel.bind if isinstance(kernel, NamedKernel) else None
    launch = bind(q, keys, seq_lens, cu_seqlens_q, out, borrow) if bind is not None else None
    hear(launch or partial(kernel.run, q, keys, seq_lens, cu_seqlens_q, out))
