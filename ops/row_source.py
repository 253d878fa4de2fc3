"""The Triton source of a row program, written for the strides and dtypes at hand.

Addresses are constants where they can be; layers of one shape share a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
import triton

from .row_math import FUNCTIONS, REDUCTIONS
from .row_program import Index, read

# Elements of a block: enough for wide loads, few enough that a small batch fills the card.
_BLOCK = 512

_HELPERS = """
@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""


def source_of(
    text: str, dtypes: Sequence[torch.dtype], strides: Sequence[tuple[int, ...]], written: int
) -> tuple[str, int]:
    """The Triton source of a program, and how many blocks it takes for each token.

    Args:
        dtypes, strides: of the written tensors, then of the inputs.
        written: how many of them are written.
    """
    outputs = read(text)
    names = [f"out{i}" for i in range(written)]
    names += [f"in{i}" for i in range(len(dtypes) - written)]
    names += [f"rows{i}" for i in range(written)]
    # `debug` turns device assertions on. Sizes must not make a kernel of their own.
    lines = [f"@triton.jit(debug=True, do_not_specialize={names[len(dtypes) :]})"]
    lines += [f"def rows({', '.join(names)}):"]
    lines += ["    token = tl.program_id(0).to(tl.int64)", "    block = tl.program_id(1)"]
    first = 0
    for output in outputs:
        writer = _OutputSource(output, dtypes, strides, written)
        blocks = triton.cdiv(output["heads"], writer.heads_per_block)
        keyword = "elif" if first else "if"
        lines.append(f"    {keyword} block < {first + blocks}:")
        lines += [f"        {line}" for line in writer.lines(first)]
        first += blocks
    return f"{_HELPERS}\n\n{chr(10).join(lines)}\n", first


class _OutputSource:
    """The source of one output's blocks."""

    def __init__(
        self,
        output: dict[str, Any],
        dtypes: Sequence[torch.dtype],
        strides: Sequence[tuple[int, ...]],
        written: int,
    ) -> None:
        self.output, self.dtypes, self.strides, self.written = output, dtypes, strides, written
        width = triton.next_power_of_2(output["dim"])
        self.heads_per_block = min(triton.next_power_of_2(output["heads"]), max(1, _BLOCK // width))
        self.text: list[str] = []
        self.sizes: set[int] = set()

    def lines(self, first_block: int) -> list[str]:
        """The body of the blocks that begin at `first_block`."""
        output, count = self.output, self.heads_per_block
        for number, step in enumerate(output["steps"]):
            self.text.append(f"v{number} = {self._step(step)}")
        guards = self._guards(output["place"])
        if output["slots"] is not None:
            guards.append("inside")
        shape = f"({count}, {triton.next_power_of_2(output['dim'])})"
        target = f"out{output['target']}"
        self.sizes.add(output["dim"])
        value = f"v{output['value']}.to({target}.dtype.element_ty)"
        self.text.append(f"value = tl.broadcast_to({value}, {shape})")
        address = self._address(target, output["place"], self.strides[output["target"]])
        address = f"tl.broadcast_to({address}, {shape})"
        mask = f", mask=tl.broadcast_to({_all(guards)}, {shape})" if guards else ""
        self.text.append(f"tl.store({address}, value{mask})")
        head = f"head = ((block - {first_block}) * {count} + tl.arange(0, {count}))[:, None]"
        begin = [f"{head}.to(tl.int64)"]
        for size in sorted(self.sizes):
            padded = triton.next_power_of_2(size)
            begin.append(f"dim{size} = tl.arange(0, {padded})[None, :].to(tl.int64)")
        if output["slots"] is not None:
            (stride,) = self.strides[self.written + output["slots"]]
            rows, sink = f"rows{output['target']}", output["sink"]
            begin += [
                f"slot = tl.load(in{output['slots']} + token * {stride}).to(tl.int64)",
                *([] if sink is None else [f"slot = tl.where(slot == -1, {sink}, slot)"]),
                f"inside = (slot >= 0) & (slot < {rows})",
                'tl.device_assert(inside, "swa: an id to store at is out of range")',
            ]
        return begin + self.text

    def _step(self, step: list[Any]) -> str:
        kind, *rest = step
        if kind == "load":
            return self._load(*rest)
        if kind == "within":
            index, start, end, mask = rest
            place = self._index(index)
            inside = f"(({place}) >= {start}) & (({place}) < {end})"
            return inside if mask is None else f"{inside} & v{mask}"
        if kind == "apply":
            name, arguments, dtype = rest
            given = [f"v{a[1]}" if isinstance(a, list) else _number(a) for a in arguments]
            return _rounded(FUNCTIONS[name].source.format(*given), dtype)
        number, size, dtype = rest
        reduction = REDUCTIONS[kind]
        value = f"v{number}"
        self.sizes.add(size)
        padded = triton.next_power_of_2(size)
        # One number for the whole row stands in for each of its elements, too.
        if padded != size or ("dim", size) not in self._step_axes(number):
            value = f"tl.where(dim{size} < {size}, {value}, {reduction.neutral})"
        result = f"tl.reduce({value}, 1, {reduction.combine})[:, None]"
        if kind == "mean":
            result = f"{result} / {size}"
        return _rounded(result, dtype)

    def _load(self, number: int, places: list[Index], mask: int | None) -> str:
        strides = self.strides[self.written + number]
        address = self._address(f"in{number}", places, strides)
        guards = self._guards(places)
        if mask is not None:
            guards.append(f"v{mask}")
        masked = f", mask={_all(guards)}, other=0.0" if guards else ""
        # A mask may not be wider than what it masks, nor a value narrower than its step says.
        for axis in sorted(self._load_axes(places, mask) - _moving(places, strides)):
            address += f" + 0 * {self._index(list(axis))}"
        loaded = f"tl.load({address}{masked})"
        dtype = self.dtypes[self.written + number]
        if dtype.is_floating_point and dtype is not torch.float32:
            return f"{loaded}.to(tl.float32)"
        return loaded

    def _mask_axes(self, mask: int) -> set[tuple[Any, ...]]:
        _, index, _, _, outer = self.output["steps"][mask]
        return _axes(index) | (self._mask_axes(outer) if outer is not None else set())

    def _step_axes(self, number: int) -> set[tuple[Any, ...]]:
        """The axes that the value of a step has."""
        kind, *rest = self.output["steps"][number]
        if kind == "load":
            return self._load_axes(*rest[1:])
        if kind == "within":
            return self._mask_axes(number)
        if kind == "apply":
            given = [a[1] for a in rest[1] if isinstance(a, list)]
            return set().union(*(self._step_axes(step) for step in given))
        return {axis for axis in self._step_axes(rest[0]) if axis[0] != "dim"}

    def _load_axes(self, places: list[Index], mask: int | None) -> set[tuple[Any, ...]]:
        return _axes(places) | (set() if mask is None else self._mask_axes(mask))

    def _address(self, name: str, places: list[Index], strides: tuple[int, ...]) -> str:
        terms = [name, "tl.full((1, 1), 0, tl.int64)"]
        for place, stride in zip(places, strides, strict=True):
            if place != 0 and stride != 0:
                terms.append(f"({self._index(place)}) * {stride}")
        return " + ".join(terms)

    def _guards(self, places: list[Index]) -> list[str]:
        """What keeps the padding of a block from being read or written."""
        found = []
        used = _axes(places)
        if ("head",) in used and self.output["heads"] % self.heads_per_block:
            found.append(f"(head < {self.output['heads']})")
        for axis in sorted(used):
            if axis[0] == "dim" and triton.next_power_of_2(axis[1]) != axis[1]:
                found.append(f"(dim{axis[1]} < {axis[1]})")
        return found

    def _index(self, index: Index) -> str:
        if not isinstance(index, list):
            return str(index)
        name, *rest = index
        if name == "dim":
            self.sizes.add(rest[0])
            return f"dim{rest[0]}"
        if not rest:
            return str(name)
        right = self._index(rest[1]) if name == "+" else str(rest[1])
        return f"(({self._index(rest[0])}) {name} {right})"


def _axes(index: Any) -> set[tuple[Any, ...]]:
    """The axes that an index, or a list of them, depends on."""
    if not isinstance(index, list) or not index:
        return set()
    if index[0] in ("token", "head", "slot", "dim"):
        return {tuple(index)}
    return set().union(*(_axes(part) for part in index))


def _moving(places: list[Index], strides: tuple[int, ...]) -> set[tuple[Any, ...]]:
    """The axes along which an address moves: not those of an expanded dimension."""
    pairs = zip(places, strides, strict=True)
    return set().union(*(_axes(place) for place, stride in pairs if stride != 0))


def _all(guards: list[str]) -> str:
    return " & ".join(guards)


def _number(value: float) -> str:
    """A number as a tensor of one element, which broadcasts like any other step."""
    text = f'float("{value}")' if not isfinite(value) else repr(float(value))
    return f"tl.full((1, 1), {text}, tl.float32)"


_ROUND: dict[str, Callable[[str], str]] = {
    "float32": lambda value: value,
    "bool": lambda value: value,
    "bfloat16": lambda value: f"({value}).to(tl.bfloat16).to(tl.float32)",
    "float16": lambda value: f"({value}).to(tl.float16).to(tl.float32)",
    "float8_e4m3fn": lambda value: f"({value}).to(tl.float8e4nv).to(tl.float32)",
    "float8_e5m2": lambda value: f"({value}).to(tl.float8e5).to(tl.float32)",
}


# What a kernel can compute and write.
DTYPES = frozenset(_ROUND)


def _rounded(value: str, dtype: str) -> str:
    """`value` as a tensor of `dtype` would hold it."""
    return _ROUND[dtype](value)
