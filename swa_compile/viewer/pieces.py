"""The pieces that Inductor cut a graph into, and the operators between them, layer by layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from swa_compile.generated_code import pieces_and_operators
from swa_compile.viewer.layers import Layers

Node = dict[str, Any]

_PIECE = re.compile(r"^(?P<indent>\s*)def partition_(?P<number>\d+)\(")


def find_pieces(code: str, nodes: list[Node], layers: Layers) -> list[dict[str, Any]]:
    """What the code around the pieces calls, in order; nothing where the code was not cut.

    Args:
        code: Inductor's.
        nodes: of the graph that it was made of, or of one that calls the operators between the
            pieces in the same order.
        layers: of `nodes`.

    Returns:
        For a piece a dict with "piece" (its number), "line" and "end" (its first and last line in
        the code, from 1; 0 where they are not found). For an operator between pieces one with
        "operator", and with "node" and "layer" where they are known: an operator that `nodes` call
        more or less often than the code is not told apart.
    """
    order = pieces_and_operators(code)
    if not order:
        return []
    lines = dict(_lines(code))
    called: dict[str, int] = defaultdict(int)
    for item in order:
        if isinstance(item, str):
            called[_target(item)] += 1
    calls: dict[str, Iterator[Node]] = {}
    for target, count in called.items():
        found = [node for node in nodes if node["target"] == target]
        calls[target] = iter(found if len(found) == count else [])
    pieces: list[dict[str, Any]] = []
    for item in order:
        if isinstance(item, int):
            first, last = lines.get(item, (0, 0))
            pieces.append({"piece": item, "line": first, "end": last})
            continue
        node = next(calls[_target(item)], None)
        cut: dict[str, Any] = {"operator": _target(item)}
        if node is not None:
            cut["node"] = node["name"]
            if node["name"] in layers.of:
                cut["layer"] = layers.of[node["name"]]
        pieces.append(cut)
    return pieces


def _target(call: str) -> str:
    """An operator as graphs have it, "ns::op" or "ns::op.overload", from "ns.op.overload"."""
    namespace, _, name = call.partition(".")
    return f"{namespace}::{name.removesuffix('.default')}"


def _lines(code: str) -> Iterator[tuple[int, tuple[int, int]]]:
    """The number of each piece, with the first and the last line of its function."""
    lines = code.splitlines()
    for first, line in enumerate(lines):
        piece = _PIECE.match(line)
        if piece is None:
            continue
        last = first
        for i in range(first + 1, len(lines)):
            text = lines[i]
            if text.strip():
                if len(text) - len(text.lstrip()) <= len(piece["indent"]):
                    break
                last = i
        yield int(piece["number"]), (first + 1, last + 1)
