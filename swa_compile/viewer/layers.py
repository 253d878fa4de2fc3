"""Which layer of the model each node of a graph belongs to.

The *anchors* of a layer are its KV stores, its attention calls and its calls of bodies. Two rules,
the first that applies:

    module   Every anchor was traced inside a numbered module (`model.layers.3.self_attn`). The
             layer is the path up to the outermost number that tells anchors apart.
    order    Otherwise: a store begins a layer, what follows up to the next store belongs to it. A
             second attention call in a row begins one, too (layers that share a cache); a second
             one-cache store through the same ids does not (K and V written one by one).

By `order`, any other node belongs to the first anchor at or behind it, and a translation to the
first anchor that its result reaches. A later stage keeps the layers of the stage before the hoist:
an attention call by its name, the n-th write of a cache by being the n-th.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Node = dict[str, Any]

ANCHORS = ("store", "attention", "subgraph")
_OUTSIDE = ("input", "output", "hoisted")


@dataclass
class Layers:
    """The layers of one graph at one stage.

    Attributes:
        rule: "module" or "order".
        names: of the layers, in order of their first anchor.
        of: node name -> index of its layer; nodes outside all layers are missing.
    """

    rule: str
    names: list[str] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)


def find_layers(nodes: list[Node]) -> Layers:
    """The layers of a graph, by its own nodes."""
    anchors = [node for node in nodes if node["kind"] in ANCHORS]
    keys = _module_keys(anchors)
    if keys is None:
        layers = _by_order(nodes)
    else:
        names = list(dict.fromkeys(keys.values()))
        place = {name: i for i, name in enumerate(names)}
        layers = Layers("module", names, {node: place[key] for node, key in keys.items()})
        for node in nodes:
            for prefix in _numbered(node.get("module", "")):
                if prefix in place and not node.get("prologue"):
                    layers.of[node["name"]] = place[prefix]
    _place_translations(nodes, layers)
    return layers


def follow_layers(before: list[Node], layers: Layers, nodes: list[Node]) -> Layers:
    """The layers of a later stage, `nodes`, given those of the stage `before`."""
    if layers.rule == "module":
        found = Layers("module", list(layers.names))
        place = {name: i for i, name in enumerate(layers.names)}
        for node in nodes:
            for prefix in _numbered(node.get("module", "")):
                if prefix in place and not node.get("prologue"):
                    found.of[node["name"]] = place[prefix]
        return found
    writes = _writes(before)
    known: dict[str, int] = {}
    for name, key in _anchor_keys(nodes).items():
        source = name if name in layers.of else writes.get(key)
        if source is not None and source in layers.of:
            known[name] = layers.of[source]
    found = Layers("order", list(layers.names), known)
    _fill_by_position(nodes, found)
    return found


def _anchor_keys(nodes: list[Node]) -> dict[str, tuple[str, int]]:
    """For each store, which write of its first cache it is: (cache, n); for others a dummy."""
    count: dict[str, int] = defaultdict(int)
    keys = {}
    for node in nodes:
        if node["kind"] not in ANCHORS:
            continue
        keys[node["name"]] = ("", -1)
        if node["kind"] == "store":
            for i, cache in enumerate(node.get("caches", [])):
                if i == 0:
                    keys[node["name"]] = (cache, count[cache])
                count[cache] += 1
    return keys


def _writes(nodes: list[Node]) -> dict[tuple[str, int], str]:
    """Which node makes the n-th write of each cache."""
    count: dict[str, int] = defaultdict(int)
    found = {}
    for node in nodes:
        if node["kind"] == "store":
            for cache in node.get("caches", []):
                found[cache, count[cache]] = node["name"]
                count[cache] += 1
    return found


def _numbered(module: str) -> list[str]:
    """The prefixes of a module path that end in a number: "a.0.b.2.c" -> ["a.0", "a.0.b.2"]."""
    return [
        module[: match.end()] for match in re.finditer(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", module)
    ]


def _module_keys(anchors: list[Node]) -> dict[str, str] | None:
    """The layer of each anchor by its module, or None where modules do not tell layers apart."""
    prefixes = {node["name"]: _numbered(node.get("module", "")) for node in anchors}
    if not prefixes or not all(prefixes.values()):
        return None
    shared = min(map(len, prefixes.values()))
    for depth in range(shared):
        keys = {name: found[depth] for name, found in prefixes.items()}
        if len(set(keys.values())) > 1:
            return keys
    one_layer = sum(node["kind"] == "store" for node in anchors) <= 1
    return {name: found[0] for name, found in prefixes.items()} if one_layer else None


def _by_order(nodes: list[Node]) -> Layers:
    layers = Layers("order")
    kinds: list[str] = []  # of the anchors of the layer so far
    stored: list[Node] = []
    for node in nodes:
        if node["kind"] not in ANCHORS:
            continue
        if _begins(node, kinds, stored):
            layers.names.append(str(len(layers.names)))
            kinds, stored = [], []
        kinds.append(node["kind"])
        stored += [node] if node["kind"] == "store" else []
        layers.of[node["name"]] = len(layers.names) - 1
    _fill_by_position(nodes, layers)
    return layers


def _begins(node: Node, kinds: list[str], stored: list[Node]) -> bool:
    if not kinds or node["kind"] == "subgraph" or "subgraph" in kinds:
        return True
    if node["kind"] == "attention":
        return "attention" in kinds
    if "attention" in kinds or len(stored) > 1:
        return True
    (first,) = stored
    one_each = len(node.get("caches", [])) == len(first.get("caches", [])) == 1
    same_ids = set(node.get("args", [])) & set(first.get("args", []))
    return not (one_each and same_ids and node["caches"] != first["caches"])


def _fill_by_position(nodes: list[Node], layers: Layers) -> None:
    """Other nodes belong to the first anchor at or behind them."""
    behind: int | None = None
    for node in reversed(nodes):
        if node["kind"] in ANCHORS:
            behind = layers.of.get(node["name"], behind)
        elif behind is not None and not node.get("prologue") and node["kind"] not in _OUTSIDE:
            layers.of.setdefault(node["name"], behind)


def _place_translations(nodes: list[Node], layers: Layers) -> None:
    """A translation belongs to the first anchor that its result reaches."""
    if layers.rule == "module" and layers.of:
        waiting = [n for n in nodes if n["kind"] == "translation" and n["name"] not in layers.of]
    else:
        waiting = [n for n in nodes if n["kind"] == "translation"]
    if not waiting:
        return
    users: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for arg in node.get("args", []):
            users[arg].append(node)
    order = {node["name"]: i for i, node in enumerate(nodes)}
    for call in waiting:
        seen, todo, reached = {call["name"]}, [call["name"]], []
        while todo:
            for user in users[todo.pop()]:
                if user["kind"] in ANCHORS and user["name"] in layers.of:
                    reached.append(user["name"])
                elif user["name"] not in seen:
                    seen.add(user["name"])
                    todo.append(user["name"])
        if reached:
            layers.of[call["name"]] = layers.of[min(reached, key=order.__getitem__)]
