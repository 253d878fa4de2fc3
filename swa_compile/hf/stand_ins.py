"""Parts of a model that others stand in for while it runs over a pool.

A part that computes the right thing in a way that does not compile whole, or asks the whole batch
where it should ask one request, is replaced for the duration of a forward and put back after it.
What stands in uses the part's own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StandIn:
    """One part of a model and what stands in for it.

    Attributes:
        parent: the module that holds the part.
        name: its name there.
        module: what stands in.
    """

    parent: nn.Module
    name: str
    module: nn.Module


@contextmanager
def standing_in(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Inside the block the parts are replaced; after it they are what they were before."""
    # By `_modules`: assigning would register nothing new, but it would run the parent's
    # `__setattr__`, which remote code may have changed.
    before = [one.parent._modules[one.name] for one in stand_ins]
    for one in stand_ins:
        one.parent._modules[one.name] = one.module
    try:
        yield
    finally:
        for one, was in zip(stand_ins, before, strict=True):
            one.parent._modules[one.name] = was
