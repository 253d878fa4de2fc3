"""Token ids on their way in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Token:
    """One generated token: of which prompt, which id, and whether it is that prompt's last."""

    prompt: int
    id: int
    last: bool


def checked(prompt: int, value: Any, vocab: int) -> int:
    """`value` as a token id of the `prompt`-th prompt.

    Raises:
        TypeError: it is no integer. ValueError: the vocabulary has no such id.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"prompt {prompt} holds {value!r}, which is no token id")
    token = int(value.__index__())
    if not 0 <= token < vocab:
        raise ValueError(f"prompt {prompt} holds the id {token}; the vocabulary has {vocab}")
    return token
