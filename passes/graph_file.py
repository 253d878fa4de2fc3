"""`graph.json` of a graph's dump: the nodes of all stages, and what is known around them.

Most nodes look the same in several stages, so each distinct one is written once: "nodes" is the
table of them, and a stage holds indices into it. "omitted" names stages that were left out because
the file would have exceeded its bound. What a node holds is listed in `stages`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .folder import MAX_BYTES, write_file
from .reading import read_json, short_json

FORMAT = 1
_NAME = "graph.json"

_Types = Mapping[str, "type | tuple[type, ...]"]
# What is read: the types of keys that have to be there, and of those that may be.
_GRAPH: tuple[_Types, _Types] = (
    {"stages": list},
    {
        **{"nodes": list, "stacks": list, "answers": list, "inputs": list, "omitted": list},
        **{"provenance": dict, "options": dict},
    },
)
_STAGE: tuple[_Types, _Types] = ({"name": str, "file": str, "nodes": list}, {})
_ANSWER: tuple[_Types, _Types] = ({"node": str, "calls": list}, {})
_NODE: tuple[_Types, _Types] = (
    {"name": str, "op": str, "target": str, "kind": str},
    {
        **{"args": list, "caches": list, "shape": (list, str), "dtype": str, "device": str},
        **{"module": str, "source": str, "stack": int, "place": int, "values": int},
    },
)


def write_graph(folder: Path, data: dict[str, Any]) -> None:
    """Write `graph.json`; stages that do not fit into the bound of a file are left out, last first.

    Args:
        folder: of the graph.
        data: "stages", each with its "nodes", and whatever else JSON holds; "omitted" of an earlier
            writing stay so.
    """
    stages = list(data["stages"])
    omitted: list[str] = list(data.get("omitted", []))
    while True:
        packed = {**data, **_pack(stages)}
        if omitted:
            packed["omitted"] = omitted
        if not stages:  # whatever is large now belongs to stages
            packed |= {"stacks": [], "answers": []}
        text = json.dumps(packed, separators=(",", ":")) + "\n"  # ASCII: a byte a character
        if len(text) <= MAX_BYTES or not stages:
            break
        omitted = [stages.pop()["name"], *omitted]
    write_file(folder / _NAME, text)


def read_graph(folder: Path) -> dict[str, Any]:
    """What `write_graph` was given, from the file in `folder`; without stages if there is none.

    Raises:
        ValueError: where the file is not of this format; its message names it.
    """
    path = folder / _NAME
    if not path.is_file():
        return {"format": FORMAT, "stages": []}
    try:
        data: dict[str, Any] = read_json(path)
        if not isinstance(data, dict):
            raise ValueError("it is no object")
        if data.get("format") != FORMAT:
            raise ValueError(f"it has format {data.get('format')}, and this version reads {FORMAT}")
        _check("the graph", data, *_GRAPH)
        table = data.pop("nodes", [])
        for node in table:
            _check("a node", node, *_NODE)
            _check_names(node.get("args", []), node.get("caches", []))
        for stage in data["stages"]:
            _check("a stage", stage, *_STAGE)
            stage["nodes"] = [table[i] for i in stage["nodes"]]
        for answer in data.get("answers", []):
            _check("an answer", answer, *_ANSWER)
            _check_names(answer["calls"])
        _check_names(data.get("stacks", []), data.get("inputs", []), data.get("omitted", []))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return data


def _check(what: str, item: Any, required: _Types, optional: _Types) -> None:
    if not isinstance(item, dict):
        raise ValueError(f"{what} is no object")
    for key, kind in {**required, **optional}.items():
        if key not in item and key in optional:
            continue
        if not isinstance(item.get(key), kind):
            raise ValueError(f"'{key}' of {what} is {short_json(item.get(key))}")


def _check_names(*lists: list[Any]) -> None:
    for names in lists:
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"{short_json(name)} is no name")


def _pack(stages: list[dict[str, Any]]) -> dict[str, Any]:
    table: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    packed = []
    for stage in stages:
        order = []
        for node in stage["nodes"]:
            place = index.setdefault(json.dumps(node), len(table))
            if place == len(table):
                table.append(node)
            order.append(place)
        packed.append({**stage, "nodes": order})
    return {"stages": packed, "nodes": table}
