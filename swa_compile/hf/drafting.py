"""A draft model: several decode steps in one compiled graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from swa_compile.collecting import collect
from swa_compile.hf.bridge import Bridge, Forward, last_logits
from swa_compile.hf.compiling import LEAST, compile_apart, compiles, mark_dynamic
from swa_compile.hf.layers import AttentionLayer
from swa_compile.hf.registration import attached
from swa_compile.hf.room import Room, chunk_for
from swa_compile.hf.rounds import Turn
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.kv.host import on_device
from swa_compile.passes import GraphReport


@dataclass
class LaterSteps:
    """Index tensors of the draft steps after the first: one token of a request in each.

    Requests that take part in a step stand ahead of those that do not.
    """

    positions: Tensor  # int64 [steps, B]
    out_cache_loc: Tensor  # int64 [steps, B]: full slots; 0, the sink, where none takes part
    seq_lens: Tensor  # int32 [steps, B]; 0 where none takes part
    cu_seqlens_q: Tensor  # int32 [steps, B + 1]

    def step(self, i: int, input_ids: Tensor, first: ForwardBatch) -> ForwardBatch:
        """The batch of step `i`, with the pages that `first` has for all steps."""
        return ForwardBatch(
            input_ids=input_ids,
            positions=self.positions[i],
            out_cache_loc=self.out_cache_loc[i],
            page_table=first.page_table,
            seq_lens=self.seq_lens[i],
            cu_seqlens_q=self.cu_seqlens_q[i],
            full_to_swa_index_mapping=first.full_to_swa_index_mapping,
        )


def draft_tokens(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    pool: HybridKVPool,
    batch: ForwardBatch,
    later: LaterSteps,
    vocab: int,
) -> Tensor:
    """Tokens that `model` continues each request with, greedily: int64 `[B, 1 + steps]`.

    Args:
        batch: of the first step, of any number of tokens per request.
        vocab: token ids from here on are not drafted.
    """
    token = last_logits(model, layers, pool, batch)[:, :vocab].argmax(-1)
    drafts = [token]
    for i in range(later.positions.shape[0]):
        batch = later.step(i, token, batch)
        token = last_logits(model, layers, pool, batch)[:, :vocab].argmax(-1)
        drafts.append(token)
    return torch.stack(drafts, 1)


class Draft:
    """A draft model over a pool of its own.

    Args:
        model: the draft model, as `Bridge` takes it.
        tokens: most tokens to draft at a time.
        vocab: of the target: ids from here on are not drafted.
        chunk: prompt tokens of a request per forward; None for what suits the pool.
        backend, options: of torch.compile.
        sizes: of the pool.

    Attributes:
        bridge, pool: the model's.
        reports: a `GraphReport` of every graph that was compiled for it.

    Raises:
        UnsupportedModel: as `Bridge` does.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens: int,
        vocab: int,
        chunk: int | None,
        backend: Any,
        options: dict[str, Any] | None,
        **sizes: Any,
    ) -> None:
        self.tokens = tokens
        self.bridge = Bridge(model)
        self.pool = self.bridge.make_pool(max_extend=1 + tokens, **sizes)
        self.room = Room(self.pool, chunk_for(self.pool, chunk), tokens, "the draft's pool")
        self.reports: list[GraphReport] = []
        self.width = -(-self.pool.max_context // self.pool.page_size)
        own = model.get_input_embeddings().weight.shape[0]
        # Ids that only the target has look like this one: they may cost drafts and nothing else.
        self._known = own
        self._vocab = min(own, vocab)
        self._compiled = compiles(backend)
        # Of rounds in which no request drafts: prompts that go in.
        self.extend = Forward(self.bridge, self.pool, backend, options)
        self._draft = compile_apart(draft_tokens, backend, options)

    def propose(self, turns: Sequence[Turn]) -> Tensor:
        """Bring the draft model's cache up to each turn, and draft.

        Args:
            turns: those with the most drafts first, and those that lack nothing last.

        Returns:
            int64 `[rows, tokens]` on the device, at least a row for each turn; of row i the first
            `turns[i].drafts` are drafts, and the rest is not specified.
        """
        rows = max(len(turns), LEAST)
        asked = [turn for turn in turns if turn.lacking]
        ahead = [max(turn.drafts - 1, 0) for turn in asked]
        # Slots for all steps beforehand, so that nothing is evicted which an earlier end sees.
        pieces = [
            (turn.sequence.draft_row, [*map(self._id, turn.lacking), *[0] * more])
            for turn, more in zip(asked, ahead, strict=True)
        ]
        with self._collecting():
            if any(turn.drafts for turn in asked):
                whole = self.pool.batch(pieces, width=self.width)  # type: ignore[arg-type]
                first, later = self._steps(asked, ahead, whole, rows)
                return self._run(first, later)
            if asked:
                self.extend(self.pool.batch(pieces, width=self.width))  # type: ignore[arg-type]
        return torch.zeros(rows, self.tokens, dtype=torch.int64, device=self.bridge.model.device)

    def _id(self, token: int) -> int:
        return token if token < self._known else 0

    def _run(self, first: ForwardBatch, later: LaterSteps) -> Tensor:
        if self._compiled:
            mark_dynamic(first)
            for tensor in vars(later).values():
                torch._dynamo.mark_dynamic(tensor, 1)
        bridge = self.bridge
        with torch.no_grad(), attached(bridge.configs):
            drafts: Tensor = self._draft(
                bridge.model, bridge.layers, self.pool, first, later, self._vocab
            )
        return drafts

    def _steps(
        self, turns: Sequence[Turn], ahead: Sequence[int], whole: ForwardBatch, rows: int
    ) -> tuple[ForwardBatch, LaterSteps]:
        """The batch of all tokens, step by step, with `rows` requests."""
        steps, padding = self.tokens - 1, rows - len(turns)
        none = whole.input_ids.shape[0]  # the lane of padding, behind all others
        lanes: list[int] = []
        later = [[none] * rows for _ in range(steps)]
        start = 0
        for row, (turn, more) in enumerate(zip(turns, ahead, strict=True)):
            end = start + len(turn.lacking)
            lanes += range(start, end)
            for i in range(more):
                later[i][row] = end + i
            start = end + more
        # Two tokens where the last drafts were all accepted, one where not: always as two.
        tokens = max(len(lanes), 2 * rows)
        lanes += [none] * (tokens - len(lanes))

        counts = [len(turn.lacking) for turn in turns] + [0] * padding
        sizes = [self._lengths(turns, ahead, padding, 0) + [0, *accumulate(counts)]]
        for i in range(steps):
            active = sum(more > i for more in ahead)
            lengths = self._lengths(turns, ahead, padding, i + 1)
            sizes.append(lengths + [min(row, active) for row in range(rows + 1)])

        device = whole.positions.device
        index = on_device(lanes + sum(later, []), torch.int64, device)
        positions = F.pad(whole.positions, (0, 1))[index]
        loc = F.pad(whole.out_cache_loc, (0, 1))[index]
        size = on_device(sizes, torch.int32, device)
        seq_lens, offsets = size[:, :rows].contiguous(), size[:, rows:].contiguous()
        first = ForwardBatch(
            input_ids=F.pad(whole.input_ids, (0, 1))[index[:tokens]],
            positions=positions[:tokens],
            out_cache_loc=loc[:tokens],
            page_table=F.pad(whole.page_table, (0, 0, 0, padding)),
            seq_lens=seq_lens[0],
            cu_seqlens_q=offsets[0],
            full_to_swa_index_mapping=whole.full_to_swa_index_mapping,
        )
        return first, LaterSteps(
            positions=positions[tokens:].view(steps, rows),
            out_cache_loc=loc[tokens:].view(steps, rows),
            seq_lens=seq_lens[1:],
            cu_seqlens_q=offsets[1:],
        )

    def _lengths(
        self, turns: Sequence[Turn], ahead: Sequence[int], padding: int, step: int
    ) -> list[int]:
        """Tokens in the cache in `step`; 0 where a request takes no part in it."""
        lengths = []
        for turn, more in zip(turns, ahead, strict=True):
            assert turn.sequence.draft_row is not None
            before = self.pool.length(turn.sequence.draft_row) - more
            lengths.append(before + step if step <= more else 0)
        return lengths + [0] * padding

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        with collect() as reports:
            yield
        self.reports += reports
