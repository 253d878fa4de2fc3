"""The target's forward over drafted tokens, and which of them it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from swa_compile.hf.bridge import Bridge, logits_of
from swa_compile.hf.compiling import LEAST, compile_apart, compiles, mark_dynamic, mark_rows
from swa_compile.hf.rounds import Turn
from swa_compile.hf.sampling import most_likely
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.kv.host import on_device


@dataclass
class Drafted:
    """Where drafted tokens stand in a batch of the target, of which k follow a request at most."""

    drafts: Tensor  # int64 [rows, k]: token ids
    source: Tensor  # int64 [N]: place of each token in `drafts`, flattened; -1: no drafted one
    lanes: Tensor  # int64 [B, k + 1]: of each request the last token before the drafts, then those
    counts: Tensor  # int64 [B]: drafts of each request; lanes past them repeat the last one


def verify(
    bridge: Bridge,
    pool: HybridKVPool,
    batch: ForwardBatch,
    drafted: Drafted,
) -> tuple[Tensor, Tensor]:
    """Run the target over known and drafted tokens.

    Returns:
        Logits `[B * (k + 1), vocab]` of what follows each of the lanes, and int64 `[B, 2k + 2]`:
        the most likely tokens there, k + 1 of them (-1 where there is none); the k drafts; and how
        many of those are accepted: up to the first that is not the most likely token.
    """
    source, lanes, counts = drafted.source, drafted.lanes, drafted.counts
    taken = drafted.drafts.flatten()[source.clamp_min(0)]
    ids = torch.where(source < 0, batch.input_ids, taken)
    batch = ForwardBatch(
        input_ids=ids,
        positions=batch.positions,
        out_cache_loc=batch.out_cache_loc,
        page_table=batch.page_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        full_to_swa_index_mapping=batch.full_to_swa_index_mapping,
    )
    logits = logits_of(bridge, pool, batch, lanes.flatten())
    likely = most_likely(logits).view(lanes.shape)
    proposed = ids[lanes][:, 1:]
    places = torch.arange(proposed.shape[1], device=counts.device)
    right = (likely[:, :-1] == proposed) & (places < counts[:, None])
    accepted = right.long().cumprod(1).sum(1)
    return logits, torch.cat([likely, proposed, accepted[:, None]], 1)


@dataclass
class Verdict:
    """What the target says of one turn.

    Attributes:
        likely: the most likely token after the last known one and after each draft; -1 for none.
        drafts: the drafted tokens.
        accepted: how many of those are the most likely ones, up to the first that is not.
        logits: `[1 + drafts, vocab]`, of which `likely` are the largest.
    """

    likely: list[int]
    drafts: list[int]
    accepted: int
    logits: Tensor


class Verification:
    """The target's forward over known and drafted tokens.

    Args:
        bridge, pool: the target's.
        tokens: most drafts of a request.
        width: columns of the page table.
        backend, options: of torch.compile.
    """

    def __init__(
        self,
        bridge: Bridge,
        pool: HybridKVPool,
        tokens: int,
        width: int,
        backend: Any,
        options: dict[str, Any] | None,
    ) -> None:
        self.bridge, self.pool, self.tokens, self.width = bridge, pool, tokens, width
        self._compiled = compiles(backend)
        self._call = compile_apart(verify, backend, options)

    def __call__(self, turns: Sequence[Turn], drafts: Tensor) -> list[Verdict]:
        """Extend each turn's request by its known and drafted tokens; one synchronization.

        Args:
            drafts: from `Draft.propose`, for the same turns.
        """
        batch, drafted = self._batch(turns, drafts)
        if self._compiled:
            mark_dynamic(batch)
            mark_rows(*vars(drafted).values())
        bridge = self.bridge
        with torch.no_grad(), bridge.adaptation.attached():
            logits, result = self._call(bridge, self.pool, batch, drafted)
        k = self.tokens
        logits = logits.view(-1, k + 1, logits.shape[-1])
        return [
            Verdict(
                likely=row[: turn.drafts + 1],
                drafts=row[k + 1 : k + 1 + turn.drafts],
                accepted=row[-1],
                logits=logits[i, : turn.drafts + 1],
            )
            for i, (turn, row) in enumerate(zip(turns, result.tolist(), strict=False))
        ]

    def _batch(self, turns: Sequence[Turn], drafts: Tensor) -> tuple[ForwardBatch, Drafted]:
        k = self.tokens
        pieces, source, lanes = [], [], []
        for i, turn in enumerate(turns):
            pieces.append((turn.sequence.row, [*turn.known, *[0] * turn.drafts]))
            source += [-1] * len(turn.known)
            last = len(source) - 1
            source += range(i * k, i * k + turn.drafts)
            lanes.append([last + min(j, turn.drafts) for j in range(k + 1)])
        batch = self.pool.batch(pieces, width=self.width)  # type: ignore[arg-type]
        rows = max(len(turns), LEAST)
        # While all decode, N is the same whatever is drafted.
        tokens = max(len(source), rows * (k + 1))
        device = drafts.device
        index = on_device(source + [-1] * (tokens - len(source)), torch.int64, device)
        counts = [turn.drafts for turn in turns]
        table = [[*row, count] for row, count in zip(lanes, counts, strict=True)]
        of_rows = F.pad(on_device(table, torch.int64, device), (0, 0, 0, rows - len(turns)))
        drafted = Drafted(
            drafts=drafts,
            source=index,
            lanes=of_rows[:, :-1].contiguous(),
            counts=of_rows[:, -1].contiguous(),
        )
        return batch.pad(tokens, rows), drafted
