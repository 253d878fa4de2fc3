"""Random numbers for sampling."""

from __future__ import annotations

from hashlib import blake2b


class Draws:
    """The random numbers of a run: one for each new token of each prompt.

    Each is a hash of seed, prompt and place, so that one that is asked for again is the same (for
    a token that was drafted and not accepted, say) and none has to be kept.

    Args:
        seed: of all; any integer.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def number(self, prompt: int, place: int) -> float:
        """In [0, 1): of the `place`-th new token of the `prompt`-th prompt."""
        key = b"%d %d %d" % (self._seed, prompt, place)
        bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53  # as many as a float holds
