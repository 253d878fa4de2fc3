"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

# Of a large vocabulary the sorted probabilities of more rows would take gigabytes.
_ROWS = 16
# No two logits of float32, be they bfloat16 or more, are as close to each other as to share this.
_COLDEST = 2.0**-126
# Probabilities are multiples of 1 / _ONE: sums of whole numbers are exact in whatever order they
# are made, while torch has no deterministic `cumsum` of floats on a GPU.
_ONE = 2.0**52


def most_likely(logits: Tensor) -> Tensor:
    """Of each row of `logits` `[R, vocab]` the first of its largest: int64 `[R]`.

    -1 in rows that give no probabilities: with NaN or +inf, or of -inf alone.
    """
    largest, token = logits.max(-1)  # NaN where there is one
    return torch.where(largest.isfinite(), token, -1)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: divides the logits; 0 for the most likely token (greedy).
        top_p: the smallest set of tokens with this much probability is drawn from (nucleus
            sampling, arXiv:1904.09751); 1 for all.
        seed: of the random numbers, any integer. Each request has its own, so what it draws does
            not depend on the requests that run beside it.

    Raises:
        ValueError, TypeError: naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("temperature", Real), ("top_p", Real), ("seed", Integral)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                wanted = "a number" if kind is Real else "an int"
                raise TypeError(f"{name} is {wanted}; got {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is a number of at least 0; got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1; got {self.top_p!r}")

    def choose(self, logits: Tensor, numbers: Tensor | None) -> Tensor:
        """A token for each row of `logits` `[R, vocab]`, int64 `[R]`, on their device.

        Args:
            numbers: float64 `[R]` in [0, 1), one random number for each row; not asked for where
                the choice is greedy.

        Returns:
            -1 in rows that give no probabilities: with NaN or +inf, or of -inf alone.
        """
        if self.temperature == 0:
            return most_likely(logits)
        assert numbers is not None
        rows = zip(logits.split(_ROWS), numbers.split(_ROWS), strict=True)
        return torch.cat([self._draw(*part) for part in rows])

    def _draw(self, logits: Tensor, numbers: Tensor) -> Tensor:
        logits = logits.float()
        # In float32 neither it nor its reciprocal, which a GPU multiplies by, may be 0 or infinite.
        temperature = min(max(self.temperature, _COLDEST), 1 / _COLDEST)
        # Without the largest, as a small temperature would make more than one of them infinite.
        chances = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
        tokens = None
        if self.top_p < 1:
            chances, tokens = chances.sort(descending=True, stable=True)
        weights = (chances.double() * _ONE).long()
        sums = weights.cumsum(-1)
        total = sums[:, -1:]
        if self.top_p < 1:
            # The token that brings the sum to top_p is in: what stands before it is below.
            kept = sums - weights < self.top_p * total.double()
            total = torch.where(kept, sums, 0).amax(-1, keepdim=True)
        at = torch.searchsorted(sums, (numbers[:, None] * total).long(), right=True)
        at = at.clamp_max(chances.shape[-1] - 1)  # beyond the end only without probabilities
        drawn = at if tokens is None else tokens.gather(-1, at)
        return torch.where(chances[:, :1].isnan(), -1, drawn)[:, 0]
