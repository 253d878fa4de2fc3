"""A draft model: several decode steps in one compiled graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swa_compile.collecting import collect
from swa_compile.hf.bridge import Bridge, Forward, last_logits
from swa_compile.hf.compiling import LEAST, compile_apart, compiles, mark_dynamic
from swa_compile.hf.draft_steps import LaterSteps, Span, cut
from swa_compile.hf.room import Room, chunk_for
from swa_compile.hf.rounds import Turn
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.passes import GraphReport


def draft_tokens(
    bridge: Bridge,
    pool: HybridKVPool,
    batch: ForwardBatch,
    later: LaterSteps,
    vocab: int,
) -> Tensor:
    """Tokens with which a model continues each request, greedily: int64 `[B, 1 + steps]`.

    Args:
        batch: of the first step, of any number of tokens per request.
        vocab: token ids from here on are not drafted.
    """
    token = last_logits(bridge, pool, batch)[:, :vocab].argmax(-1)
    drafts = [token]
    for i in range(later.positions.shape[0]):
        batch = later.step(i, token, batch)
        token = last_logits(bridge, pool, batch)[:, :vocab].argmax(-1)
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
        spans = [self._span(turn) for turn in asked]
        # Slots for all steps beforehand, so that nothing is evicted which an earlier end sees.
        pieces = [
            (turn.sequence.draft_row, [*map(self._id, turn.lacking), *[0] * span.later])
            for turn, span in zip(asked, spans, strict=True)
        ]
        with self._collecting():
            if any(turn.drafts for turn in asked):
                whole = self.pool.batch(pieces, width=self.width)  # type: ignore[arg-type]
                # A request lacks two tokens where its last drafts were all accepted, and one
                # where not: padded to two, so that N is the same in all rounds of decoding.
                return self._run(*cut(whole, spans, self.tokens - 1, rows, tokens=2 * rows))
            if asked:
                self.extend(self.pool.batch(pieces, width=self.width))  # type: ignore[arg-type]
        return torch.zeros(rows, self.tokens, dtype=torch.int64, device=self.bridge.model.device)

    def _span(self, turn: Turn) -> Span:
        assert turn.sequence.draft_row is not None
        length = self.pool.length(turn.sequence.draft_row) + len(turn.lacking)
        return Span(len(turn.lacking), max(turn.drafts - 1, 0), length)

    def _id(self, token: int) -> int:
        return token if token < self._known else 0

    def _run(self, first: ForwardBatch, later: LaterSteps) -> Tensor:
        if self._compiled:
            mark_dynamic(first)
            for tensor in vars(later).values():
                torch._dynamo.mark_dynamic(tensor, 1)
        bridge = self.bridge
        with torch.no_grad(), bridge.adaptation.attached():
            drafts: Tensor = self._draft(bridge, self.pool, first, later, self._vocab)
        return drafts

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        with collect() as reports:
            yield
        self.reports += reports
