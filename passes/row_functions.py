"""Which operators of a graph are functions of a row program (`swa_compile.ops.row_math`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .emit import size_of
from .schema import bind, tensors

aten = torch.ops.aten

# dtypes that a program computes in, by their names there.
FLOATS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}

_FUNCTIONS: dict[Any, str] = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.exp.default: "exp",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.relu.default: "relu",
    aten.reciprocal.default: "reciprocal",
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.clamp_max.default: "minimum",
    torch.ops.prims.convert_element_type.default: "cast",
    aten._to_copy.default: "cast",
    aten.clone.default: "cast",
}

_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}

_REDUCTIONS: dict[Any, str] = {
    aten.mean.dim: "mean",
    aten.sum.dim_IntList: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
}


def applied(node: Node) -> tuple[str, list[Any]] | None:
    """The function that `node` applies and its operands, nodes or numbers; None if unknown."""
    name, count = _FUNCTIONS.get(node.target), None
    if node.target is aten.pow.Tensor_Scalar:
        exponent = node.args[1]
        name = _POWERS.get(exponent) if isinstance(exponent, (int, float)) else None
        count = 1
    if name is None or not _floating(node) or not _same_device(node):
        return None
    if name == "cast":
        count = 1
    elif bind(node.target, node).get("alpha", 1) != 1:  # type: ignore[arg-type]
        return None
    operands = list(node.args[:count])
    for operand in operands:
        if isinstance(operand, Node):
            if not _floating(operand):
                return None
        elif isinstance(operand, bool) or not isinstance(operand, (int, float)):
            return None
    return name, operands


def reduced(node: Node) -> tuple[str, Node] | None:
    """The reduction over the last dimension that `node` is, and its operand; None where none."""
    kind = _REDUCTIONS.get(node.target)
    if kind is None or not _floating(node):
        return None
    source = node.args[0]
    dims = bind(node.target, node)["dim"]  # type: ignore[arg-type]
    if not isinstance(source, Node) or not _floating(source) or not isinstance(dims, (list, tuple)):
        return None
    (value,) = tensors(source)
    return (kind, source) if [d % value.dim() for d in dims] == [value.dim() - 1] else None


def joined(node: Node) -> tuple[list[Node], int] | None:
    """The pieces that have elements, and the dimension, of a concatenation; None where none."""
    if node.target is not aten.cat.default or not _floating(node) or not _same_device(node):
        return None
    given = bind(aten.cat.default, node)
    (value,) = tensors(node)
    # torch joins an empty vector to anything.
    pieces = [p for p in given["tensors"] if all(size_of(e) != 0 for e in tensors(p)[0].shape)]
    if not pieces or not all(map(_floating, pieces)):
        return None
    return pieces, given["dim"] % value.dim()


def _floating(node: Node) -> bool:
    found = tensors(node)
    return len(found) == 1 and found[0].dtype in FLOATS


def _same_device(node: Node) -> bool:
    devices = {
        value.device for operand in [node, *node.all_input_nodes] for value in tensors(operand)
    }
    return len(devices) == 1
