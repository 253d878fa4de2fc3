"""The functions that a row program may use: on tensors, and as Triton source.

In Triton every floating-point value is held in float32 and rounded to the step's dtype after each
step, which is what eager code does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Function:
    """One function of a row program.

    Attributes:
        on_tensors: what it is.
        source: the same as a Triton expression over `{0}`, `{1}`, ...
    """

    on_tensors: Callable[..., Any]
    source: str


@dataclass(frozen=True)
class Reduction:
    """One reduction over the last dimension, which stays as 1.

    Attributes:
        on_tensor: what it is.
        combine: name of the function in the kernel's source that combines two values.
        neutral: what stands where there is no element, as source.
    """

    on_tensor: Callable[[Tensor], Tensor]
    combine: str
    neutral: str


def _scalar_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` where either operand may be a number."""

    def call(a: Any, b: Any) -> Tensor:
        if not isinstance(a, Tensor):
            a = torch.as_tensor(a, dtype=b.dtype, device=b.device)
        return function(a, b)

    return call


# Division and roots are the correctly rounded ones: Triton's own are faster and less exact.
FUNCTIONS: dict[str, Function] = {
    "cast": Function(lambda a: a, "{0}"),
    "neg": Function(torch.neg, "-({0})"),
    "abs": Function(torch.abs, "tl.abs({0})"),
    "exp": Function(torch.exp, "tl.exp({0})"),
    "sin": Function(torch.sin, "tl.sin({0})"),
    "cos": Function(torch.cos, "tl.cos({0})"),
    "sqrt": Function(torch.sqrt, "tl.sqrt_rn({0})"),
    "rsqrt": Function(torch.rsqrt, "tl.rsqrt({0})"),
    "sigmoid": Function(torch.sigmoid, "tl.div_rn(1.0, 1.0 + tl.exp(-({0})))"),
    "relu": Function(torch.relu, "_larger({0}, 0.0)"),
    "square": Function(torch.square, "({0}) * ({0})"),
    "reciprocal": Function(torch.reciprocal, "tl.div_rn(1.0, {0})"),
    "add": Function(_scalar_first(torch.add), "({0}) + ({1})"),
    "sub": Function(_scalar_first(torch.sub), "({0}) - ({1})"),
    "mul": Function(_scalar_first(torch.mul), "({0}) * ({1})"),
    "div": Function(_scalar_first(torch.div), "tl.div_rn({0}, {1})"),
    "maximum": Function(
        lambda a, b: torch.clamp_min(a, b) if not isinstance(b, Tensor) else torch.maximum(a, b),
        "_larger({0}, {1})",
    ),
    "minimum": Function(
        lambda a, b: torch.clamp_max(a, b) if not isinstance(b, Tensor) else torch.minimum(a, b),
        "_smaller({0}, {1})",
    ),
    "where": Function(torch.where, "tl.where({0}, {1}, {2})"),
}

REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(lambda a: a.float().sum(2, keepdim=True), "_plus", "0.0"),
    "mean": Reduction(lambda a: a.float().mean(2, keepdim=True), "_plus", "0.0"),
    "max": Reduction(lambda a: a.amax(2, keepdim=True), "_larger", 'float("-inf")'),
    "min": Reduction(lambda a: a.amin(2, keepdim=True), "_smaller", 'float("inf")'),
}
