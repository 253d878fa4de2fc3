"""The names that graph inputs have in the user's code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from swa_compile.passes import GraphReport
from swa_compile.passes.errors import GraphError


def input_names(gm: GraphModule) -> list[str]:
    """A readable name for each input of a Dynamo graph, e.g. "batch.out_cache_loc"."""
    return [_readable(node) for node in gm.graph.nodes if node.op == "placeholder"]


def with_names(report: GraphReport, names: list[str]) -> GraphReport:
    """`report` with AOTAutograd's "arg7_1" replaced by the names of the user's code."""
    rename = _renaming(report.inputs, names)
    data = report.to_dict()
    for key in ("values", "refused", "caches"):
        data[key] = rename(data[key])
    data["inputs"] = {rename(arg): place for arg, place in report.inputs.items()}
    return GraphReport.from_dict(data)


def name_inputs(error: BaseException, names: list[str]) -> None:
    """Put the user's names into the messages of `error` and of what it wraps."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = getattr(current, "inner_exception", None) or current.__cause__
    inputs = next((link.inputs for link in chain if isinstance(link, GraphError)), {})
    rename = _renaming(inputs, names)
    for link in chain:
        link.args = tuple(rename(list(link.args)))


def _renaming(inputs: dict[str, int], names: list[str]) -> Callable[[Any], Any]:
    known = {arg: names[place] for arg, place in inputs.items() if place < len(names)}
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, known)) + r")\b") if known else None

    def rename(value: Any) -> Any:
        if isinstance(value, str) and pattern is not None:
            return pattern.sub(lambda match: known[match.group()], value)
        if isinstance(value, list):
            return [rename(item) for item in value]
        if isinstance(value, dict):
            return {key: rename(item) for key, item in value.items()}
        return value

    return rename


def _readable(node: Any) -> str:
    """Dynamo's source of a placeholder as Python, without its "L[...]"; else the node's name."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    if callable(name):  # a method before torch 2.12, a property since
        name = name()
    if not isinstance(name, str):
        return str(node.name)
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:buffers|parameters|modules)\['([\w.]+)'\]", r".\1", name)
    return name
