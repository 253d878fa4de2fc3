"""Tokens that the next forward reads on the device, before the host knows them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing

import torch
from torch import Tensor

from swa_compile.hf.draws import Draws
from swa_compile.hf.sampling import Sampling
from swa_compile.hf.scheduler import Scheduler, Sequence
from swa_compile.hf.tokens import Token
from swa_compile.kv.host import Arriving, on_device

Waiting = Mapping[int, Sequence]  # by row of the logits, who gets a token


class Ahead:
    """Chooses a token for whoever waits for one, forward after forward.

    Args:
        scheduler: of the sequences.
        sampling: how tokens are chosen.
        ends: ids that end a sequence.
        overlap: read the tokens of a forward when the next one has begun, not at once.
    """

    def __init__(
        self, scheduler: Scheduler, sampling: Sampling, ends: set[int], *, overlap: bool
    ) -> None:
        self._scheduler, self._sampling, self._ends = scheduler, sampling, ends
        self._overlap = overlap
        self._draws = Draws(sampling.seed)
        self._unread: Chosen | None = None

    def fill(self, ids: Tensor) -> Tensor:
        """`ids` `[N]` with tokens in place of place holders."""
        return ids if self._unread is None else self._unread.fill(ids)

    def tokens(self, steps: Generator[tuple[Waiting, Tensor], None, None]) -> Iterator[Token]:
        """The tokens of `steps`: of each forward who waits, and its logits `[B, vocab]`.

        Where a step fails, those of the forward before it come first. `steps` is closed at the end.
        """
        # Closed here: an error, as long as somebody keeps it, keeps what it went through.
        with closing(steps):
            while True:
                try:
                    chosen = self._choose(*next(steps))
                except StopIteration:
                    break
                except Exception:
                    yield from self._read_last()
                    raise
                earlier, self._unread = self._unread, chosen
                if earlier is not None:
                    yield from self._read(earlier)
                if not self._overlap:
                    yield from self._read_last()
            yield from self._read_last()

    def _choose(self, waiting: Waiting, logits: Tensor) -> Chosen | None:
        if not waiting:  # all of them for more of their prompts
            return None
        numbers = None
        if self._sampling.temperature > 0:
            drawn = [0.0] * len(logits)
            for row, sequence in waiting.items():
                drawn[row] = self._draws.number(sequence.index, len(sequence.new))
            numbers = on_device(drawn, torch.float64, logits.device)
        chosen = Chosen(self._sampling.choose(logits, numbers), waiting)
        for sequence in waiting.values():
            if len(sequence.new) == sequence.limit:  # whatever its last token is
                self._scheduler.finish(sequence)
        return chosen

    def _read_last(self) -> Iterator[Token]:
        last, self._unread = self._unread, None
        if last is not None:
            yield from self._read(last)

    def _read(self, chosen: Chosen) -> Iterator[Token]:
        for sequence, token, count in chosen.read():
            last = token in self._ends or count == sequence.limit
            if last:
                del sequence.new[count:]  # the next forward was for one that there is not
                if sequence.row is not None:
                    self._scheduler.finish(sequence)
            yield Token(sequence.index, token, last)


class Chosen:
    """The tokens of one forward.

    Each sequence has a place holder in its list of new tokens: a negative number, which says in
    which row of the logits its token was chosen. `fill` puts the tokens in place of those on the
    device, `read` on the host.

    Args:
        tokens: int64 `[B]`; negative where there is none to choose.
        waiting: by row of these, the sequences that get a token.
    """

    def __init__(self, tokens: Tensor, waiting: Waiting) -> None:
        self._tokens, self._arriving = tokens, Arriving(tokens)
        self._of = [(row, sequence, len(sequence.new)) for row, sequence in waiting.items()]
        for row, sequence in waiting.items():
            sequence.new.append(~row)

    def fill(self, ids: Tensor) -> Tensor:
        """`ids` `[N]` with the tokens in place of their place holders."""
        tokens = self._tokens[(~ids).clamp_min(0)]
        return torch.where(ids < 0, tokens.clamp_min(0), ids)

    def read(self) -> Iterator[tuple[Sequence, int, int]]:
        """Wait for the tokens: each sequence, its token, and how many new ones it has with that.

        A sequence that was cut shorter in the meantime gets none.

        Raises:
            ValueError: there was none to choose, as the logits were NaN.
        """
        tokens = self._arriving.tolist()
        for row, sequence, place in self._of:
            if place < len(sequence.new):
                sequence.new[place] = checked_choice(tokens[row], sequence)
                yield sequence, tokens[row], place + 1


def checked_choice(token: int, sequence: Sequence) -> int:
    """`token`, which `Sampling.choose` gave `sequence`.

    Raises:
        ValueError: it is none.
    """
    if token < 0:
        raise ValueError(
            f"the logits after the tokens of prompt {sequence.index} hold NaN or +inf, or nothing "
            "but -inf"
        )
    return token
