"""`graph.json` of a graph's dump: the nodes of all stages, and what is known around them.

Most nodes look the same in several stages, so each distinct one is written once: "nodes" is the
table of them, and a stage holds indices into it. "omitted" names stages that were left out because
the file would have exceeded its bound. What a node holds is listed in `stages`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .folder import MAX_BYTES, write_file

FORMAT = 1
_NAME = "graph.json"


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
    if not path.exists():
        return {"format": FORMAT, "stages": []}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']}, and this version reads {FORMAT}")
        table = data.pop("nodes", [])
        for stage in data["stages"]:
            stage["nodes"] = [table[i] for i in stage["nodes"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    found: dict[str, Any] = data
    return found


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
