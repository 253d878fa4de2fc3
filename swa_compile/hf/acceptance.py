"""What became of the drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Acceptance:
    """Counts of speculative decoding, over all requests of all runs so far.

    Attributes:
        verifications: times that drafts of a request were verified.
        drafted: draft tokens in those.
        accepted: those that became output.
    """

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Share of the draft tokens that were accepted; 0 before there are any."""
        return self.accepted / max(self.drafted, 1)

    @property
    def mean_length(self) -> float:
        """Mean acceptance length: new tokens of a request per verification, the target's own one
        included; from 1 to `draft_tokens` + 1."""
        return 1 + self.accepted / max(self.verifications, 1)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification; nothing where nothing was drafted."""
        if drafted:
            self.verifications += 1
            self.drafted += drafted
            self.accepted += accepted
