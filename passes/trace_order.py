"""The order in which the translation calls of a graph were traced.

Inductor moves calls to where they are used ahead of the passes. So the calls of Dynamo's graph are
numbered, and AOTAutograd copies the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

# AOTAutograd hands what users annotate (torch.fx.traceback.annotate) on to the nodes it makes.
_ANNOTATIONS, _NUMBER = "custom", "swa_compile_call"


def number(calls: Iterable[Node]) -> None:
    """Have `traced_places` know the order of `calls`, of a graph that is still to be traced."""
    for i, call in enumerate(calls):
        call.meta[_ANNOTATIONS] = {**call.meta.get(_ANNOTATIONS, {}), _NUMBER: i}


def traced_places(calls: Sequence[Node]) -> dict[Node, int]:
    """The place of each of `calls` among them, in the order of their trace.

    All are -1 where that is not known of one of them, which came out of a subgraph, say: then
    nobody could tell which call of the trace the others are.
    """
    numbers = [call.meta.get(_ANNOTATIONS, {}).get(_NUMBER, -1) for call in calls]
    if -1 in numbers or len(set(numbers)) < len(numbers):
        return dict.fromkeys(calls, -1)
    places = {n: i for i, n in enumerate(sorted(numbers))}
    return {call: places[n] for call, n in zip(calls, numbers, strict=True)}
