"""Random numbers for sampling."""

from __future__ import annotations

import torch

_BLOCK = 64


class Draws:
    """The random numbers of a run: one for each new token of each prompt.

    They are told by prompt and place, so that one that is asked for again is the same: for a token
    that was drafted and not accepted, say.

    Args:
        seed: of all.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[int, torch.Generator] = {}
        self._numbers: dict[int, list[float]] = {}

    def number(self, prompt: int, place: int) -> float:
        """In [0, 1): of the `place`-th new token of the `prompt`-th prompt."""
        numbers = self._numbers.setdefault(prompt, [])
        if prompt not in self._generators:
            # No two of a million prompts share their numbers with those of a neighbouring seed.
            seed = (self._seed * 1_000_003 + prompt) % 2**63
            self._generators[prompt] = torch.Generator().manual_seed(seed)
        while place >= len(numbers):
            block = torch.rand(
                _BLOCK, generator=self._generators[prompt], dtype=torch.float64, device="cpu"
            )
            numbers += block.tolist()
        return numbers[place]
