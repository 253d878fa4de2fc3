"""One padded size for the forwards of all ranks, agreed on ahead of the forward."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
import torch.distributed as dist

from swa_compile.distributed.groups import gather_rows, global_ranks


@dataclass(frozen=True)
class Bucket:
    """What `agree_on_bucket` found, the same on every rank.

    Attributes:
        tokens, requests: N and B that every rank pads its batch to (`ForwardBatch.pad`).
        rank_tokens, rank_requests: what each rank of the group has itself, in the group's order.
    """

    tokens: int
    requests: int
    rank_tokens: tuple[int, ...]
    rank_requests: tuple[int, ...]

    @property
    def idle(self) -> bool:
        """True where no rank has a token, so that all may leave this forward out, together."""
        return not any(self.rank_tokens)


def agree_on_bucket(
    tokens: int,
    requests: int,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    request_sizes: Sequence[int] | None = None,
) -> Bucket:
    """The least of `sizes` that holds the largest batch of any rank of `group`.

    Ranks whose forwards hold collectives have to run them at one size, idle ranks included. Every
    rank calls this once per forward, outside of compiled code: one all-gather of three int64 per
    rank. Give a gloo group for it also where the forward runs on NCCL; over NCCL the host has to
    wait for the device to read the answer.

    Args:
        tokens, requests: N and B of this rank's batch; 0 and 0 where it is idle.
        sizes: token counts that forwards are compiled (or captured) for, the same on every rank.
        group: the ranks that agree; None for all.
        request_sizes: likewise for B; None for `sizes`, which is right in decode, where B is N.

    Raises:
        ValueError: a batch is larger than every size, a count is negative, or ranks gave different
            sizes. It is raised on every rank of the group, and names the ranks at fault.
            Also, on this rank alone, where there are no sizes.
        TypeError: a count or a size is no integer.
    """
    token_sizes = _ascending("sizes", sizes)
    row_sizes = token_sizes if request_sizes is None else _ascending("request_sizes", request_sizes)
    own = [index(tokens), index(requests), _digest(token_sizes, row_sizes)]
    rows = gather_rows(torch.tensor(own, dtype=torch.int64), group).tolist()
    ranks = global_ranks(group)

    other = [rank for rank, row in zip(ranks, rows, strict=True) if row[2] != rows[0][2]]
    if other:
        raise ValueError(
            f"agree_on_bucket: rank {ranks[0]} and rank{'s' * (len(other) > 1)} "
            f"{', '.join(map(str, other))} were given different sizes; this rank has {token_sizes}"
            f" for tokens and {row_sizes} for requests"
        )
    for rank, (n, b, _) in zip(ranks, rows, strict=True):
        if n < 0 or b < 0:
            raise ValueError(f"agree_on_bucket: rank {rank} gave {n} tokens and {b} requests")
        for what, count, largest in (
            ("tokens", n, token_sizes[-1]),
            ("requests", b, row_sizes[-1]),
        ):
            if count > largest:
                raise ValueError(
                    f"agree_on_bucket: rank {rank} has {count} {what}, and the largest size is "
                    f"{largest}"
                )
    rank_tokens, rank_requests, _ = zip(*rows, strict=True)
    return Bucket(
        tokens=next(size for size in token_sizes if size >= max(rank_tokens)),
        requests=next(size for size in row_sizes if size >= max(rank_requests)),
        rank_tokens=rank_tokens,
        rank_requests=rank_requests,
    )


def _ascending(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    found = tuple(sorted({index(size) for size in sizes}))
    if not found:
        raise ValueError(f"agree_on_bucket: {name} is empty")
    return found


def _digest(*sizes: tuple[int, ...]) -> int:
    """63 bits of a hash: ranks with unlike sizes would pick unlike buckets and hang."""
    return int.from_bytes(hashlib.sha256(repr(sizes).encode()).digest()[:8], "big") >> 1
