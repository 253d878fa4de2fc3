"""Index arithmetic of row programs: places in a tensor as functions of token, head and dimension.

An index is a number or a nested list, as `swa_compile.ops.row_program` describes it.
"""

from __future__ import annotations

from typing import Any

from .emit import same_size, size_of

Index = Any


def plus(index: Index, number: int) -> Index:
    """`index` moved by a constant."""
    if isinstance(index, int):
        return index + number
    if number == 0:
        return index
    if index[0] == "+" and isinstance(index[2], int):
        return plus(index[1], index[2] + number)
    return ["+", index, number]


def flatten(parts: list[tuple[Index, int]]) -> Index:
    """The place in the merged dimension of (index, size) of each, the outermost first."""
    index: Index = 0
    for part, size in parts:
        index = _sum(_times(index, size), part)
    return index


def unflatten(index: Index, sizes: list[int]) -> list[Index]:
    """The places in dimensions of `sizes` that `index` means in the merged one."""
    found: list[Index] = []
    for i, size in enumerate(sizes):
        inner = 1
        for other in sizes[i + 1 :]:
            inner *= other
        place = _divided(index, inner)
        found.append(place if i == 0 else _remainder(place, size))
    return found


def reshaped(places: list[Index], shape: Any, target: Any) -> list[Index] | None:
    """Places in a tensor of `target` sizes that are `places` in the same data of `shape`.

    Dimensions are matched from the left, in groups of equal extent; None where a group would have
    to split a symbolic size.
    """
    found: list[Index] = []
    i = j = 0
    shape, target = [size_of(s) for s in shape], [size_of(s) for s in target]
    while i < len(shape) or j < len(target):
        if i < len(shape) and shape[i] == 1:
            i += 1
        elif j < len(target) and target[j] == 1:
            found.append(0)
            j += 1
        elif i == len(shape) or j == len(target):
            return None
        elif same_size(shape[i], target[j]):
            found.append(places[i])
            i, j = i + 1, j + 1
        else:
            group = _group(shape, i, target, j)
            if group is None:
                return None
            end, stop = group
            merged = flatten([(places[k], shape[k]) for k in range(i, end)])
            found += unflatten(merged, target[j:stop])
            i, j = end, stop
    return found


def _group(shape: list[Any], i: int, target: list[Any], j: int) -> tuple[int, int] | None:
    """Where dimensions i.. of one and j.. of the other first have as many elements."""
    if not (isinstance(shape[i], int) and isinstance(target[j], int)):
        return None
    left, right, end, stop = shape[i], target[j], i + 1, j + 1
    while left != right:
        smaller, at = (shape, end) if left < right else (target, stop)
        if at == len(smaller) or not isinstance(smaller[at], int):
            return None
        if left < right:
            left, end = left * shape[end], end + 1
        else:
            right, stop = right * target[stop], stop + 1
    return end, stop


def _times(index: Index, number: int) -> Index:
    if isinstance(index, int):
        return index * number
    return index if number == 1 else ["*", index, number]


def _sum(a: Index, b: Index) -> Index:
    if isinstance(a, int) and a == 0:
        return b
    if isinstance(b, int):
        return plus(a, b)
    return plus(b, a) if isinstance(a, int) else ["+", a, b]


def _divided(index: Index, number: int) -> Index:
    if number == 1:
        return index
    if isinstance(index, int):
        return index // number
    whole, rest = _split(index, number)
    return whole if rest is not None else ["//", index, number]


def _remainder(index: Index, number: int) -> Index:
    if isinstance(index, int):
        return index % number
    _, rest = _split(index, number)
    return rest if rest is not None else ["%", index, number]


def _split(index: Index, number: int) -> tuple[Index, Index | None]:
    """(a, b) where `index` is known to be a * number + b with 0 <= b < number; b None if not."""
    if _below(index, number):
        return 0, index
    if index[0] == "*" and index[2] % number == 0:
        return _times(index[1], index[2] // number), 0
    if index[0] == "+" and isinstance(index[1], list) and index[1][0] == "*":
        _, outer, factor = index[1]
        if factor % number == 0 and _below(index[2], number):
            return _times(outer, factor // number), index[2]
    return index, None


def _below(index: Index, number: int) -> bool:
    if isinstance(index, int):
        return 0 <= index < number
    return bool(index[0] == "dim" and index[1] <= number)
