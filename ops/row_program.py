"""A row program: what a layer does to each head of each token, as text that two machines can run.

Between the projection and the attention call a layer treats every row `[token, head, :]` by
itself: it normalizes, rotates, quantizes and stores it. A row program says so step by step. The
reference below runs it on any device; `row_triton` makes one kernel of it.

A program is JSON: `{"outputs": [output, ...]}`. Each output has

    heads, dim   its extent; with the number of tokens, its shape
    target       which written tensor
    place        the index of each dimension of that tensor
    slots        the input that holds the row of each token, or null
    sink         the row of tokens whose slot is -1, or null where none is
    value        number of the step that is written
    steps        lists that begin with a name, each the number of its place:

        ["load", input, places, mask or null]
            an element of an input; 0 where the mask is false
        ["within", index, first, end, mask or null]
            whether first <= index < end and the mask is true
        ["apply", function, arguments, dtype]
            a function of `row_math` of numbers and of earlier steps, ["step", number]
        ["sum" | "mean" | "max" | "min", step, size, dtype]
            over the whole dimension, kept as 1

An index is a number or one of ["token"], ["head"], ["dim", size], ["slot"], ["+", index, index],
["*", index, number], ["//", index, number], ["%", index, number].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .row_math import FUNCTIONS, REDUCTIONS

Index = Any  # a number, or a nested list as above


def write(outputs: Sequence[dict[str, Any]]) -> str:
    """The text of a program; equal programs have equal texts, whatever layer they come from."""
    return json.dumps({"outputs": list(outputs)}, separators=(",", ":"), sort_keys=True)


@cache
def read(text: str) -> list[dict[str, Any]]:
    """The outputs of a program; not to be changed."""
    outputs: list[dict[str, Any]] = json.loads(text)["outputs"]
    return outputs


def run(text: str, written: Sequence[Tensor], inputs: Sequence[Tensor], tokens: int) -> None:
    """The rule: write each output of the program for `tokens` tokens, one after another."""
    values = [_Evaluation(output, inputs, tokens) for output in read(text)]
    for evaluation in values:
        evaluation.write(written)


class _Evaluation:
    """One output, all rows at once: every value is `[tokens or 1, heads or 1, dim or 1]`."""

    def __init__(self, output: dict[str, Any], inputs: Sequence[Tensor], tokens: int) -> None:
        self.output, self.inputs, self.tokens = output, inputs, tokens
        self.device = inputs[0].device
        self.steps: list[Tensor] = []
        for step in output["steps"]:
            self.steps.append(self._step(step))
        self.value = self.steps[output["value"]]

    def write(self, written: Sequence[Tensor]) -> None:
        target = written[self.output["target"]]
        shape = (self.tokens, self.output["heads"], self.output["dim"])
        place = tuple(self._index(index) for index in self.output["place"])
        target[place] = self.value.broadcast_to(shape).to(target.dtype)

    def _step(self, step: list[Any]) -> Tensor:
        kind, *rest = step
        if kind == "load":
            return self._load(*rest)
        if kind == "within":
            index, first, end, mask = rest
            place = self._index(index)
            inside = (place >= first) & (place < end)
            return inside if mask is None else inside & self.steps[mask]
        if kind == "apply":
            name, arguments, dtype = rest
            values = [self.steps[a[1]] if isinstance(a, list) else a for a in arguments]
            return FUNCTIONS[name].on_tensors(*values).to(getattr(torch, dtype))
        number, size, dtype = rest
        value = self.steps[number]
        value = value.broadcast_to((*value.shape[:2], size))
        return REDUCTIONS[kind].on_tensor(value).to(getattr(torch, dtype))

    def _load(self, number: int, places: list[Index], mask: int | None) -> Tensor:
        source = self.inputs[number]
        indices = [self._index(place) for place in places]
        if mask is None:
            return source[tuple(indices)] if indices else source.reshape(1, 1, 1)
        sizes = zip(indices, source.shape, strict=True)
        # Where the mask is false the place may be none at all.
        value = source[tuple(index.clamp(0, size - 1) for index, size in sizes)]
        return torch.where(self.steps[mask], value, torch.zeros_like(value))

    def _index(self, index: Index) -> Tensor:
        """`index` as int64, of three dimensions."""
        if not isinstance(index, list):
            return torch.full((1, 1, 1), index, device=self.device)
        name, *rest = index
        if name == "token":
            return torch.arange(self.tokens, device=self.device)[:, None, None]
        if name == "head":
            return torch.arange(self.output["heads"], device=self.device)[None, :, None]
        if name == "dim":
            return torch.arange(rest[0], device=self.device)[None, None, :]
        if name == "slot":
            slots: Tensor = self.inputs[self.output["slots"]].long()
            if (sink := self.output["sink"]) is not None:
                slots = torch.where(slots == -1, sink, slots)
            # Not a row from the end: past the end of any tensor.
            slots = torch.where(slots < 0, 2**62, slots)
            return slots[: self.tokens, None, None]
        left = self._index(rest[0])
        if name == "+":
            return left + self._index(rest[1])
        operations: dict[str, Any] = {
            "*": torch.mul,
            "//": torch.floor_divide,
            "%": torch.remainder,
        }
        result: Tensor = operations[name](left, rest[1])
        return result
