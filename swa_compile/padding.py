"""The static inputs of a bucket: how batches are checked, padded into them, and cut to size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swa_compile.addresses import copy_all, independent, nbytes
from swa_compile.kv import ForwardBatch

# Inputs with a row for each request, and the one with a row more.
_OF_REQUESTS = ("seq_lens", "page_table")
_OFFSETS = "cu_seqlens_q"
# Where the number of tokens is read off; else the first input that is not of the above.
_OF_TOKENS = ("out_cache_loc", "input_ids", "positions")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """What all batches of a runner have in common.

    Attributes:
        rows: name -> (dtype, shape of a row), of the inputs that are padded.
        live: inputs that are handed on as they are.
        counts: the input that tells the number of tokens.
        batch: the class of `ForwardBatch` that they come as; None for keywords.
    """

    rows: dict[str, tuple[torch.dtype, torch.Size]]
    live: frozenset[str]
    counts: str
    batch: type[ForwardBatch] | None
    device: torch.device

    @classmethod
    def of(
        cls,
        named: Mapping[str, Tensor],
        live: frozenset[str],
        batch: type[ForwardBatch] | None,
    ) -> Form:
        """The form of one batch.

        Raises:
            TypeError: for an input that is no tensor, or none that has tokens.
            ValueError: for a 0-d input.
        """
        rows = {}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"input {name} is a tensor; got {type(tensor).__name__}")
            if name in live:
                continue
            if tensor.dim() == 0:
                raise ValueError(f"input {name} has a row for each token; got a 0-d tensor")
            rows[name] = (tensor.dtype, tensor.shape[1:])
        of_tokens = [name for name in rows if name not in (*_OF_REQUESTS, _OFFSETS)]
        known = [name for name in _OF_TOKENS if name in of_tokens]
        if not of_tokens:
            raise TypeError("a batch has at least one input with a row for each token")
        counts = [*known, *of_tokens][0]
        return cls(rows, live & named.keys(), counts, batch, named[counts].device)

    @property
    def has_requests(self) -> bool:
        return any(name in self.rows for name in (*_OF_REQUESTS, _OFFSETS))

    def check(self, named: Mapping[str, Tensor], batch: type[ForwardBatch] | None) -> None:
        """Raise TypeError or ValueError where `named` is not of this form, naming the input."""
        if batch is not self.batch:
            want, got = (
                "keyword tensors" if kind is None else f"a {kind.__name__}"
                for kind in (self.batch, batch)
            )
            raise TypeError(f"the first call brought {want}; got {got}")
        wanted = {*self.rows, *self.live}
        if missing := sorted(wanted - named.keys()):
            raise TypeError(f"missing input {', '.join(missing)}; the first call had it")
        if extra := sorted(named.keys() - wanted):
            raise TypeError(
                f"unknown input {', '.join(extra)}; the first call had {sorted(wanted)}"
            )
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"input {name} is a tensor; got {type(tensor).__name__}")
            if name in self.live:
                continue
            dtype, row = self.rows[name]
            if tensor.dtype is not dtype:
                raise TypeError(f"input {name} is {dtype}; got {tensor.dtype}")
            if tensor.dim() != len(row) + 1 or tensor.shape[1:] != row:
                want = ", ".join(["rows", *map(str, row)])
                raise ValueError(f"input {name} has shape [{want}]; got {tuple(tensor.shape)}")
            if tensor.device != self.device:
                raise ValueError(f"input {name} is on {self.device}; got {tensor.device}")
        tokens, requests = self.sizes(named)
        for name in self.rows:
            want_rows, got_rows = self.length(name, tokens, requests), named[name].shape[0]
            if want_rows != got_rows:
                raise ValueError(
                    f"input {name} has {want_rows} rows for {tokens} tokens"
                    + (f" of {requests} requests" if name != self.counts and requests else "")
                    + f" ({self.counts} has {tokens}); got {got_rows}"
                )

    def sizes(self, named: Mapping[str, Tensor]) -> tuple[int, int | None]:
        """N and B; None where there are no inputs of requests."""
        tokens = named[self.counts].shape[0]
        for name in _OF_REQUESTS:
            if name in self.rows:
                return tokens, named[name].shape[0]
        return tokens, named[_OFFSETS].shape[0] - 1 if _OFFSETS in self.rows else None

    def length(self, name: str, tokens: int, requests: int | None) -> int:
        """Rows of an input in a batch of these sizes."""
        if name == _OFFSETS:
            return (requests or 0) + 1
        return requests or 0 if name in _OF_REQUESTS else tokens

    def arguments(self, named: Mapping[str, Tensor]) -> Arguments:
        """Positional and keyword arguments of the function."""
        return ((), dict(named)) if self.batch is None else ((self.batch(**named),), {})


@dataclass
class StaticInputs:
    """Input buffers of one bucket, at addresses that never change.

    Attributes:
        tokens, requests: N and B of the bucket.
        buffers: name -> tensor.
    """

    form: Form
    tokens: int
    requests: int | None
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # they are filled inside and outside of that mode
            self.buffers = {
                name: torch.zeros(
                    (self.form.length(name, self.tokens, self.requests), *row),
                    dtype=dtype,
                    device=self.form.device,
                )
                for name, (dtype, row) in self.form.rows.items()
            }

    @property
    def device(self) -> torch.device:
        return self.form.device

    def nbytes(self) -> int:
        return sum(map(nbytes, self.buffers.values()))

    def clear(self) -> None:
        """Padding alone: every token writes the sink, and no request has a token."""
        for buffer in self.buffers.values():
            buffer.zero_()

    def fill(self, named: Mapping[str, Tensor], tokens: int, requests: int | None) -> None:
        """Put a batch of these sizes in, and clear what lies behind it."""
        pairs, tails = [], []
        for name, buffer in self.buffers.items():
            rows = self.form.length(name, tokens, requests)
            if named[name].data_ptr() != buffer.data_ptr() and rows:
                pairs.append((buffer[:rows], named[name]))
            if name != _OFFSETS and rows < buffer.shape[0]:
                tails.append(buffer[rows:])
        copy_all(pairs)
        for tail in tails:
            tail.zero_()
        offsets = self.buffers.get(_OFFSETS)
        if offsets is not None and requests is not None and requests + 1 < offsets.shape[0]:
            # The last offset again: the requests of padding have no tokens.
            offsets[requests + 1 :] = offsets[requests]

    def arguments(self, named: Mapping[str, Tensor]) -> Arguments:
        """Arguments of the function: the buffers, and what is live of `named`."""
        return self.form.arguments(
            {name: self.buffers.get(name, tensor) for name, tensor in named.items()}
        )

    def cut(self, result: Any, tokens: int, requests: int | None) -> Any:
        """The tensors of `result` without the rows of padding; none of them in a buffer."""
        storages = {buffer.untyped_storage().data_ptr() for buffer in self.buffers.values()}
        leaves, spec = pytree.tree_flatten(result)
        outputs = {id(out): out for out in leaves if isinstance(out, Tensor)}
        inside = {i: o for i, o in outputs.items() if o.untyped_storage().data_ptr() in storages}
        outputs.update(zip(inside, independent(list(inside.values())), strict=True))
        cut = {i: self._without_padding(out, tokens, requests) for i, out in outputs.items()}
        return pytree.tree_unflatten([cut.get(id(out), out) for out in leaves], spec)

    def _without_padding(self, out: Tensor, tokens: int, requests: int | None) -> Tensor:
        if out.dim() == 0:
            return out
        if out.shape[0] == self.tokens:
            return out[:tokens]
        if requests is not None and out.shape[0] == self.requests:
            return out[:requests]
        return out
