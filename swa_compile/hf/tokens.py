"""Token ids on their way in and out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any


@dataclass(frozen=True)
class Token:
    """One generated token: of which prompt, which id, and whether it is that prompt's last."""

    prompt: int
    id: int
    last: bool


def token_ids(name: str, values: Any) -> list[int]:
    """`values`, which messages call `name`, as a list of integers.

    Raises:
        TypeError: it is no collection, or holds what is no integer.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is a collection of token ids; got {values!r}")
    ids = list(values)
    for value in ids:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} holds {value!r}, which is no token id")
    return list(map(index, ids))


def token_ids_within(name: str, values: Any, vocab: int) -> list[int]:
    """`token_ids` of which each is in a vocabulary of so many.

    Raises:
        TypeError: as `token_ids`. ValueError: the vocabulary has no such id.
    """
    ids = token_ids(name, values)
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} holds the id {token}; the vocabulary has {vocab}")
    return ids
