"""Choosing the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: divides the logits; 0 for the most likely token (greedy).
        top_p: the smallest set of tokens with this much probability is drawn from (nucleus
            sampling, arXiv:1904.09751); 1 for all.
        seed: of the random numbers. Each request has its own, so what it draws does not depend on
            the requests that run beside it.

    Raises:
        ValueError: naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is a number of at least 0; got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1; got {self.top_p!r}")

    def random(self, request: int) -> torch.Generator:
        """The random numbers of the `request`-th prompt."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + request) % 2**63)

    def choose(self, logits: Tensor, random: Mapping[int, torch.Generator]) -> dict[int, int]:
        """A token for each row of logits `[B, vocab]` that `random` names, with its random numbers.

        The host waits for the device once, however many rows there are.
        """
        if self.temperature == 0:
            likely = logits.argmax(-1).tolist()
            return {row: likely[row] for row in random}
        logits = logits.cpu()
        return {row: self.draw(logits[row], numbers) for row, numbers in random.items()}

    def draw(self, logits: Tensor, random: torch.Generator) -> int:
        """A token from logits `[vocab]` on the host, where temperature is above 0."""
        chances = (logits.float() / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, tokens = chances.sort(descending=True)
            # The token that brings the sum to top_p is in: what stands before it is below.
            ordered[ordered.cumsum(-1) - ordered >= self.top_p] = 0
            return int(tokens[torch.multinomial(ordered, 1, generator=random)])
        return int(torch.multinomial(chances, 1, generator=random))
