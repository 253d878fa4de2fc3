"""The tensors of one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree


@dataclass
class ForwardBatch:
    """What a forward reads beside weights and caches. `HybridKVPool.batch` makes it.

    N is the number of new tokens, B of requests, P of page-table columns.
    """

    input_ids: Tensor  # int64 [N], set by the caller; padding 0
    positions: Tensor  # int64 [N], set by the pool: the token's place in its request; padding 0
    out_cache_loc: Tensor  # int64 [N], set by the pool: full slots to write; padding 0, the sink
    page_table: Tensor  # int32 [B, P], set by the pool: full page ids; 0 past the live pages
    seq_lens: Tensor  # int32 [B], set by the pool: tokens in the cache, new ones included
    cu_seqlens_q: Tensor  # int32 [B + 1], set by the pool: where each request's new tokens begin
    full_to_swa_index_mapping: Tensor  # int64 [full_tokens + page_size + 1], the pool's own, live

    def validate(self) -> None:
        """Check dtypes and shapes.

        Raises:
            TypeError: a dtype is wrong. ValueError: a shape is. Both name the field.
        """
        for name, (dtype, rank) in _FORM.items():
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype is not dtype:
                got = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"ForwardBatch.{name} is {dtype}; got {got}")
            if value.dim() != rank:
                raise ValueError(
                    f"ForwardBatch.{name} has rank {rank}; got shape {tuple(value.shape)}"
                )
        tokens, requests = self.input_ids.shape[0], self.seq_lens.shape[0]
        sizes = {
            "positions": tokens,
            "out_cache_loc": tokens,
            "page_table": requests,
            "cu_seqlens_q": requests + 1,
        }
        for name, want in sizes.items():
            got = getattr(self, name).shape[0]
            if got != want:
                raise ValueError(
                    f"ForwardBatch.{name} has {want} rows for {tokens} tokens of {requests} "
                    f"requests; got {got}"
                )

    def last_tokens(self) -> Tensor:
        """Where each request's last new token stands among the N: int64 `[B]`."""
        # By index: torch 2.11 cannot compile a slice of a tensor whose size is not known.
        following = torch.arange(1, self.seq_lens.shape[0] + 1, device=self.seq_lens.device)
        return self.cu_seqlens_q[following].long() - 1

    def pad(self, tokens: int, requests: int) -> ForwardBatch:
        """The same batch with N = `tokens` and B = `requests`, padding harmless.

        Padding tokens write the sink; padding requests are empty.

        Raises:
            ValueError: where that would be smaller than the batch is.
        """
        more, rows = tokens - self.input_ids.shape[0], requests - self.seq_lens.shape[0]
        refuse_to_shrink(self.input_ids.shape[0], self.seq_lens.shape[0], tokens, requests)
        if not more and not rows:
            return self  # static inputs stay where they are
        # The last offset again: the padding requests have no tokens.
        ends = self.cu_seqlens_q[-1:].expand(rows)
        return ForwardBatch(
            input_ids=F.pad(self.input_ids, (0, more)),
            positions=F.pad(self.positions, (0, more)),
            out_cache_loc=F.pad(self.out_cache_loc, (0, more)),
            page_table=F.pad(self.page_table, (0, 0, 0, rows)),
            seq_lens=F.pad(self.seq_lens, (0, rows)),
            cu_seqlens_q=torch.cat([self.cu_seqlens_q, ends]),
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
        )


def refuse_to_shrink(tokens: int, requests: int, to_tokens: int, to_requests: int) -> None:
    """Raise ValueError where a batch of this size cannot be padded to that one."""
    if to_tokens < tokens or to_requests < requests:
        raise ValueError(
            f"a batch of {tokens} tokens and {requests} requests cannot be padded to "
            f"{to_tokens} and {to_requests}"
        )


_FORM: dict[str, tuple[torch.dtype, int]] = {
    "input_ids": (torch.int64, 1),
    "positions": (torch.int64, 1),
    "out_cache_loc": (torch.int64, 1),
    "page_table": (torch.int32, 2),
    "seq_lens": (torch.int32, 1),
    "cu_seqlens_q": (torch.int32, 1),
    "full_to_swa_index_mapping": (torch.int64, 1),
}

# As a pytree it is an argument of compiled and exported callables like any tuple of tensors.
pytree.register_dataclass(ForwardBatch)
