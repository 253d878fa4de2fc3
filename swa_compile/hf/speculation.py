"""Speculative decoding: a draft model proposes tokens, the target verifies them at once."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any

import torch

from swa_compile.hf.acceptance import Acceptance
from swa_compile.hf.ahead import checked_choice
from swa_compile.hf.bridge import Bridge
from swa_compile.hf.drafting import Draft
from swa_compile.hf.draws import Draws
from swa_compile.hf.errors import UnsupportedModel, naming
from swa_compile.hf.generator import HybridGenerator
from swa_compile.hf.refusals import refuse
from swa_compile.hf.room import Room
from swa_compile.hf.rounds import SpeculativeScheduler, Turn
from swa_compile.hf.sampling import Sampling
from swa_compile.hf.scheduler import Scheduler, Sequence
from swa_compile.hf.tokens import Token
from swa_compile.hf.verification import Verdict, Verification
from swa_compile.kv.host import on_device

# Embeddings of one vocabulary are padded to sizes that differ by no more than this.
_PADDING = 128


class SpeculativeGenerator(HybridGenerator):
    """A `HybridGenerator` that has a draft model propose tokens (arXiv:2211.17192).

        generator = SpeculativeGenerator(model, draft, draft_tokens=4, max_tokens=4096,
                                         max_requests=8)

    In each round the draft model continues each request by up to `draft_tokens` tokens, greedily
    and in one compiled graph; one forward of the target verifies them all. What it generates is
    what `HybridGenerator` generates with the target alone: the same tokens when greedy, and when
    sampling, as far as rounding does not decide, the same tokens of the same seed.

    Args:
        model: the target, in eval mode.
        draft: a smaller causal language model with the same vocabulary, on the same device. It
            may be of another family. Its embeddings may be padded to another size.
        draft_tokens: most tokens to draft per request and round.
        others: as in `HybridGenerator`. The draft model has a pool of its own for as many tokens
            and requests; `swa_tokens` is the target's, and `chunk` is of both.

    Attributes:
        draft: the draft model: its `bridge`, `pool` and `reports`.
        acceptance: how many drafts were accepted.
        reports: of the target's graphs.
        verify: what runs the target in each round; `forward` runs it in `prefill`.

    Raises:
        UnsupportedModel: one of the models cannot run over a pool, and why.
        ValueError, TypeError: the models do not fit together, or for the other arguments.
    """

    def __init__(
        self,
        model: Any,
        draft: Any,
        *,
        draft_tokens: int = 4,
        max_tokens: int,
        max_requests: int,
        page_size: int = 1,
        swa_tokens: int | None = None,
        backend: Any = "swa",
        options: dict[str, Any] | None = None,
        max_context: int | None = None,
        chunk: int | None = None,
    ) -> None:
        if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int):
            raise TypeError(f"draft_tokens is an int; got {draft_tokens!r}")
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens is at least 1; got {draft_tokens}")
        with naming(model):
            refuse(model)
        with _as_draft(), naming(draft):
            refuse(draft)
        _refuse_pair(model, draft)
        self.lookahead = draft_tokens
        super().__init__(
            model,
            max_tokens=max_tokens,
            max_requests=max_requests,
            page_size=page_size,
            swa_tokens=swa_tokens,
            backend=backend,
            options=options,
            max_context=max_context,
            chunk=chunk,
            capture_sizes=(),  # of `prefill` alone
            overlap=False,  # what is drafted depends on what was accepted
        )
        with _as_draft():
            self.draft = Draft(
                draft,
                tokens=draft_tokens,
                vocab=_vocab(model),
                chunk=chunk,
                backend=backend,
                options=options,
                max_tokens=max_tokens,
                max_requests=max_requests,
                max_context=self.pool.max_context,
                page_size=page_size,
            )
        _refuse_what_rolls_back_wrongly(self.bridge)
        with _as_draft():
            _refuse_what_rolls_back_wrongly(self.draft.bridge)
        self.acceptance = Acceptance()
        self.verify = Verification(
            self.bridge, self.pool, draft_tokens, self.width, backend, options
        )

    def _empty_scheduler(self) -> SpeculativeScheduler:
        return SpeculativeScheduler(Room(self.pool, self.chunk, self.lookahead), self.draft.room)

    def _tokens(
        self, scheduler: Scheduler, sampling: Sampling, ends: set[int]
    ) -> Generator[Token, None, None]:
        assert isinstance(scheduler, SpeculativeScheduler)
        draws = Draws(sampling.seed)
        with self._running_alone(scheduler):
            while turns := scheduler.turns():
                drafts = self.draft.propose(turns)
                with self.collecting():
                    verdicts = self.verify(turns, drafts)
                tokens: list[Token] = []
                decoding: list[Sequence] = []
                for turn in turns:
                    turn.sequence.sent += len(turn.known)
                # The others have more of their prompt to send first.
                ready = [
                    (turn, verdict)
                    for turn, verdict in zip(turns, verdicts, strict=True)
                    if turn.sequence.waits_for_token
                ]
                for (turn, verdict), chosen in zip(
                    ready, _chosen(ready, sampling, draws), strict=True
                ):
                    sequence = turn.sequence
                    new = _up_to_the_end(sequence, chosen, ends)
                    self.acceptance.add(turn.drafts, min(len(new), verdict.accepted))
                    tokens += new
                    if new[-1].last:
                        scheduler.finish(sequence)
                    else:
                        decoding.append(sequence)
                scheduler.roll_back(decoding)
                yield from tokens


def _chosen(ready: list[tuple[Turn, Verdict]], sampling: Sampling, draws: Draws) -> list[list[int]]:
    """The next tokens of each: the drafts that are accepted, and one of the target's own.

    Where tokens are drawn, each is drawn from the target's logits, and a draft is accepted if it
    is the very token that was drawn. That is rejection sampling with a draft model that is certain
    of its draft: a draft x is accepted with the target's probability p(x), and else a token is
    drawn from p without x. The random numbers are those that the target alone would use.
    """
    if sampling.temperature == 0:
        return [_checked(turn, verdict.likely[: verdict.accepted + 1]) for turn, verdict in ready]
    if not ready:
        return []
    logits = torch.cat([verdict.logits for _, verdict in ready])
    numbers = [
        draws.number(turn.sequence.index, len(turn.sequence.new) + i)
        for turn, verdict in ready
        for i in range(len(verdict.logits))
    ]
    drawn = iter(sampling.choose(logits, on_device(numbers, torch.float64, logits.device)).tolist())
    chosen: list[list[int]] = []
    for turn, verdict in ready:
        tokens = list(islice(drawn, len(verdict.logits)))
        right = map(operator.eq, tokens, verdict.drafts)
        count = sum(takewhile(bool, right))
        chosen.append(_checked(turn, tokens[: count + 1]))
    return chosen


def _checked(turn: Turn, tokens: list[int]) -> list[int]:
    return [checked_choice(token, turn.sequence) for token in tokens]


def _up_to_the_end(sequence: Sequence, chosen: list[int], ends: set[int]) -> list[Token]:
    """Give `sequence` the tokens `chosen`, up to one that ends it."""
    tokens = []
    for token in chosen:
        sequence.new.append(token)
        last = token in ends or len(sequence.new) == sequence.limit
        tokens.append(Token(sequence.index, token, last))
        if last:
            break
    # All but the newest have been through the target, too: they were drafted.
    sequence.sent += len(tokens) - 1
    return tokens


def _refuse_pair(model: Any, draft: Any) -> None:
    """Raise ValueError where `draft` cannot propose tokens to `model`."""
    if model.device != draft.device:
        raise ValueError(
            f"the draft model is on {draft.device} and the target on {model.device}: both have to "
            "be on one device"
        )
    ours, theirs = _vocab(model), _vocab(draft)
    if abs(ours - theirs) > _PADDING:
        raise ValueError(
            f"the draft model has a vocabulary of {theirs} tokens and the target one of {ours}: "
            "both have to be the same (up to the padding of the embeddings)"
        )


def _refuse_what_rolls_back_wrongly(bridge: Bridge) -> None:
    """Raise UnsupportedModel where a rejected token leaves more behind than its own rows."""
    with naming(bridge.model):
        if bridge.adaptation.ropes:
            raise UnsupportedModel(
                "RoPE goes by the length of a request, which a rejected token may have taken past "
                "a border; speculative decoding needs RoPE by position alone"
            )
        if any(layer.compression is not None for layer in bridge.layers):
            raise UnsupportedModel(
                "compressed layers make one entry of several tokens, which is not taken back with "
                "a rejected one; speculative decoding needs layers with a row for each token"
            )


@contextmanager
def _as_draft() -> Iterator[None]:
    """Inside the block a refusal says that it is the draft model's."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"as a draft model: {error}") from error.__cause__


def _vocab(model: Any) -> int:
    """Token ids that `model` can be given."""
    size: int = model.get_input_embeddings().weight.shape[0]
    return size
