"""Which requests draft, and what they send to the draft model and to the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swa_compile.hf.room import Room
from swa_compile.hf.scheduler import Scheduler, Sequence


@dataclass
class Turn:
    """The part of one sequence in a round of drafting and verification.

    Attributes:
        sequence: whose it is.
        known: tokens for the target that are there already: a chunk of the prompt, or the last
            new token, which the drafts follow.
        lacking: tokens that the draft model has not seen; none where it is not asked.
        drafts: tokens to draft after those, 0 or more.
    """

    sequence: Sequence
    known: list[int]
    lacking: list[int]
    drafts: int


class SpeculativeScheduler(Scheduler):
    """A scheduler whose sequences have a request in the pool of a draft model, too.

    Args:
        target, draft: of the two pools, both with a lookahead of the tokens that are drafted.
    """

    def __init__(self, target: Room, draft: Room) -> None:
        super().__init__(target)
        self.draft = draft
        self.rooms = [target, draft]

    def open(self, sequence: Sequence) -> None:
        super().open(sequence)
        sequence.draft_row = self.draft.pool.open()

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        assert sequence.draft_row is not None
        self.draft.pool.close(sequence.draft_row)
        sequence.draft_row = None

    def turns(self) -> list[Turn]:
        """The next round, those with the most drafts first. Lets in whoever fits.

        So those that take part in a step of drafting stand ahead of those that do not.
        """
        turns = [self._turn(sequence, known) for sequence, known in self.pieces()]
        return sorted(turns, key=lambda turn: (-turn.drafts, not turn.lacking))

    def roll_back(self, sequences: Iterable[Sequence]) -> None:
        """Free what was stored of rejected drafts, in both pools.

        Of each of `sequences` all tokens but the newest stay. The draft model may have one fewer:
        it has never seen its last draft, which was accepted where all were.
        """
        target, draft = {}, {}
        for sequence in sequences:
            assert sequence.row is not None and sequence.draft_row is not None
            right = len(sequence.prompt) + len(sequence.new) - 1
            target[sequence.row] = right
            there = self.draft.pool.length(sequence.draft_row)
            draft[sequence.draft_row] = min(there, right)
        self.pool.truncate(target)
        self.draft.pool.truncate(draft)

    def _turn(self, sequence: Sequence, known: list[int]) -> Turn:
        assert sequence.row is not None and sequence.draft_row is not None
        decodes = bool(sequence.new)
        # Drafts take the place of tokens that are still wanted, but for the target's own one.
        wanted = sequence.limit - len(sequence.new) - 1
        if decodes and wanted < 1:
            return Turn(sequence, known, [], 0)
        pool = self.draft.pool
        seen = pool.length(sequence.draft_row)
        # All new tokens of a request see the same chunk, where a layer is chunked.
        most = self.draft.longest_piece(sequence)
        bound = pool.piece_bound(sequence.draft_row)
        most = most if bound is None else min(most, bound)
        lacking = sequence.after(seen, most)
        if not decodes or seen + len(lacking) < len(sequence.prompt) + len(sequence.new):
            return Turn(sequence, known, lacking, 0)
        # The last draft goes to the target alone.
        drafts = min(wanted, self.draft.lookahead, most - len(lacking) + 1)
        bound = self.pool.piece_bound(sequence.row)
        return Turn(sequence, known, lacking, drafts if bound is None else min(drafts, bound - 1))
