"""Greedy tokens that the next forward reads on the device, before the host knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from swa_compile.hf.scheduler import Scheduler, Sequence
from swa_compile.hf.tokens import Token
from swa_compile.kv.host import Arriving

Waiting = Mapping[int, Sequence]  # by row of the logits, who gets a token


def greedy_ahead(
    steps: Callable[[Callable[[Tensor], Tensor]], Iterator[tuple[Waiting, Tensor]]],
    scheduler: Scheduler,
    ends: set[int],
) -> Iterator[Token]:
    """The tokens of each forward, when the next one has begun.

    Args:
        steps: makes an iterator of forwards, who waits for a token of each and its logits
            `[B, vocab]`, from a function that puts token ids in place of place holders.
        scheduler: of the sequences.
        ends: ids that end a sequence.
    """
    chosen: Chosen | None = None  # by the last forward

    def fill(ids: Tensor) -> Tensor:
        return ids if chosen is None else chosen.fill(ids)

    for waiting, logits in steps(fill):
        unread, chosen = chosen, Chosen(logits, waiting)
        for sequence in waiting.values():
            if len(sequence.new) == sequence.limit:  # whatever its last token is
                scheduler.finish(sequence)
        if unread is not None:
            yield from _read(unread, scheduler, ends)
    if chosen is not None:
        yield from _read(chosen, scheduler, ends)


def _read(chosen: Chosen, scheduler: Scheduler, ends: set[int]) -> Iterator[Token]:
    """The tokens of a forward; whoever ends with one, and could not be foreseen to, is ended."""
    for sequence, token, count in chosen.read():
        last = token in ends or count == sequence.limit
        if last:
            del sequence.new[count:]  # the next forward was for one that there is not
            if sequence.row is not None:
                scheduler.finish(sequence)
        yield Token(sequence.index, token, last)


class Chosen:
    """The greedy tokens of one forward.

    Each sequence has a place holder in its list of new tokens: a negative number, which says in
    which row of the logits its token was chosen. `fill` puts the tokens in place of those on the
    device, `read` on the host.

    Args:
        logits: `[B, vocab]`.
        waiting: by row of these, the sequences that get a token.
    """

    def __init__(self, logits: Tensor, waiting: Waiting) -> None:
        self._tokens = logits.argmax(-1)
        self._arriving = Arriving(self._tokens)
        self._of = [(row, sequence, len(sequence.new)) for row, sequence in waiting.items()]
        for row, sequence in waiting.items():
            sequence.new.append(~row)

    def fill(self, ids: Tensor) -> Tensor:
        """`ids` `[N]` with the tokens in place of their place holders."""
        return torch.where(ids < 0, self._tokens[(~ids).clamp_min(0)], ids)

    def read(self) -> Iterator[tuple[Sequence, int, int]]:
        """Wait for the tokens: each sequence, its token, and how many new ones it has with that.

        A sequence that was cut shorter in the meantime gets none.
        """
        tokens = self._arriving.tolist()
        for row, sequence, place in self._of:
            if place < len(sequence.new):
                sequence.new[place] = tokens[row]
                yield sequence, tokens[row], place + 1
