"""What a dump tells, as the page and the terminal show it: layers, values, and what feeds what."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from swa_compile.viewer.dump import Dump
from swa_compile.viewer.kernels import kernel_calls
from swa_compile.viewer.layers import ANCHORS, Layers, find_layers, follow_layers
from swa_compile.viewer.pieces import find_pieces

Node = dict[str, Any]

_INDEX_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool", "size"})


def tell(dump: Dump) -> dict[str, Any]:
    """The story of one graph, JSON-ready.

    Returns:
        "rule" (how layers were told apart), "before" (the stage ahead of the hoist), "layers" (each
        with "name", and per stage its "calls" and "anchors"), "values" (each with what the report
        says, "code" of a refusal or "", "calls", and its "nodes" per stage), "kernels",
        "pieces" (see `find_pieces`), "inputs" (graph input -> the user's name).
    """
    stages = {stage["name"]: stage["nodes"] for stage in dump.graph["stages"]}
    before = next((n for n in ("lifted", "functional", "captured") if n in stages), "")
    names, rule, of = _layers_per_stage(stages, before)
    values = _values(dump, stages)
    feeds = _feeds(stages.get("hoisted", []), values)
    _follow_feeds(stages, feeds, before)
    layers: list[dict[str, Any]] = [{"name": name, "stages": {}} for name in names]
    value_of = {call: i for i, value in enumerate(values) for call in value["calls"]}
    value_of |= {value["node"]: i for i, value in enumerate(values) if value["node"]}
    traced = _same_calls(stages.get("captured", []), stages.get("functional", []))
    for stage, nodes in stages.items():
        for node in nodes:
            layer = of[stage].of.get(node["name"])
            if layer is None or layer >= len(layers):
                continue
            lane = layers[layer]["stages"].setdefault(stage, {"calls": [], "anchors": []})
            if node["kind"] == "translation":
                name = node["name"] if stage != "captured" else traced.get(node["name"], "")
                value = value_of.get(name)
                lane["calls"].append({"node": node["name"], "value": value})
            elif node["kind"] in ANCHORS:
                fed = feeds.get((stage, node["name"]), [])
                lane["anchors"].append({"node": node["name"], "kind": node["kind"], "values": fed})
    _add_nodes_per_stage(values, stages, feeds)
    mappings = sorted({m for value in values for m in value["operands"][:1]})
    return {
        "rule": rule,
        "before": before,
        "layers": layers,
        "values": values,
        "kernels": kernel_calls(dump.code, mappings) if dump.code else [],
        "pieces": _pieces(dump, stages, of),
        "inputs": _input_names(dump, stages),
    }


def _same_calls(captured: list[Node], functional: list[Node]) -> dict[str, str]:
    """Dynamo's translation calls -> AOTAutograd's, where both have the same operators in order."""
    a, b = ([n for n in nodes if n["kind"] == "translation"] for nodes in (captured, functional))
    if [n["target"] for n in a] != [n["target"] for n in b]:
        return {}
    return {x["name"]: y["name"] for x, y in zip(a, b, strict=True)}


def _layers_per_stage(
    stages: dict[str, list[Node]], before: str
) -> tuple[list[str], str, dict[str, Layers]]:
    of: dict[str, Layers] = {}
    if not before:
        return [], "", {}
    layers = find_layers(stages[before])
    for name, nodes in stages.items():
        if name == before:
            of[name] = layers
        elif name in ("captured", "functional"):
            # Traced ahead: other names. By module the layers are the same ones; by order they are
            # numbered alike.
            own = find_layers(nodes)
            same = {key: i for i, key in enumerate(layers.names)}
            kept = {n: same[own.names[i]] for n, i in own.of.items() if own.names[i] in same}
            of[name] = Layers(own.rule, layers.names, kept)
        else:
            of[name] = follow_layers(stages[before], layers, nodes)
    return layers.names, layers.rule, of


def _values(dump: Dump, stages: dict[str, list[Node]]) -> list[dict[str, Any]]:
    """The report's values, each with its calls and the node that answers them.

    The report lists values of bodies behind the graph's own; those have no answer here.
    """
    answers = dump.graph.get("answers", [])
    by_name = {node["name"]: node for node in stages.get("hoisted", [])}
    refused = iter(dump.report.get("refused", []))
    values: list[dict[str, Any]] = []
    for i, value in enumerate(dump.report.get("values", [])):
        answer = answers[i] if i < len(answers) else {"node": "", "calls": []}
        code = value.get("code", "")  # a cache may hold reports of before there were codes
        refusal = next(refused, None) if code else None
        node = by_name.get(answer["node"], {})
        values.append(
            {
                **value,
                "code": code,
                "calls": list(answer["calls"]),
                "node": answer["node"],
                "message": refusal["message"] if refusal else "",
                "refused_at": refusal["source"] if refusal else "",
                "operands": _operands(node, by_name, values),
                "nodes": {},
            }
        )
    return values


def _operands(node: Node, by_name: dict[str, Node], earlier: list[dict[str, Any]]) -> list[str]:
    """[mapping, ids] of a translated value, by node name."""
    if not node:
        return []
    if node["kind"] == "translation":
        return list(node.get("args", []))[:2]
    many = by_name.get(next(iter(node.get("args", [])), ""), {})
    args = many.get("args", [])
    half = len(args) // 2
    item = sum(
        by_name.get(value["node"], {}).get("args", [""])[:1] == [many.get("name")]
        for value in earlier
    )
    return [args[item], args[half + item]] if item < half and half * 2 == len(args) else []


def _feeds(nodes: list[Node], values: list[dict[str, Any]]) -> dict[tuple[str, str], list[int]]:
    """For each anchor of the hoisted graph, which values reach it through index arithmetic."""
    answers: dict[str, int] = {value["node"]: i for i, value in enumerate(values) if value["node"]}
    reach: dict[str, frozenset[int]] = {}
    feeds = {}
    for node in nodes:
        into: frozenset[int] = frozenset()
        for arg in node.get("args", []):
            into |= reach.get(arg, frozenset())
        if node["kind"] in ANCHORS:
            if into:
                feeds["hoisted", node["name"]] = sorted(into)
            continue
        own = answers.get(node["name"])
        index = node.get("dtype") in _INDEX_DTYPES and node["kind"] != "input"
        if own is not None:
            reach[node["name"]] = frozenset((own,))  # what it is computed from, it does not feed
        elif index and into:
            reach[node["name"]] = into
    return feeds


def _follow_feeds(
    stages: dict[str, list[Node]], feeds: dict[tuple[str, str], list[int]], before: str
) -> None:
    """The same for the stage ahead of the hoist and those behind it: attention calls keep their
    names, and the n-th write of a cache stays the n-th."""
    hoisted = stages.get("hoisted", [])
    writes: dict[tuple[str, int], str] = {}
    count: dict[str, int] = defaultdict(int)
    for node in hoisted:
        if node["kind"] == "store":
            for cache in node.get("caches", []):
                writes[cache, count[cache]] = node["name"]
                count[cache] += 1
    for stage, nodes in stages.items():
        if stage in ("hoisted", "captured"):
            continue
        count = defaultdict(int)
        for node in nodes:
            if node["kind"] not in ANCHORS:
                continue
            source = node["name"] if ("hoisted", node["name"]) in feeds else None
            for cache in node.get("caches", []) if node["kind"] == "store" else []:
                source = source or writes.get((cache, count[cache]))
                count[cache] += 1
            fed = feeds.get(("hoisted", source or ""))
            if fed:
                feeds[stage, node["name"]] = fed


def _add_nodes_per_stage(
    values: list[dict[str, Any]],
    stages: dict[str, list[Node]],
    feeds: dict[tuple[str, str], list[int]],
) -> None:
    """Which nodes hold a value at each stage: its calls, its item, or what feeds its users."""
    for i, value in enumerate(values):
        for stage, nodes in stages.items():
            present = {node["name"]: node for node in nodes}
            if stage in ("functional", "lifted"):
                value["nodes"][stage] = [call for call in value["calls"] if call in present]
            elif value["node"] in present and stage != "captured":
                value["nodes"][stage] = [value["node"]]
            elif stage != "captured":
                holding: dict[str, None] = {}
                for node in nodes:
                    if feeds.get((stage, node["name"])) == [i]:
                        for arg in node.get("args", []):
                            about = present.get(arg, {})
                            if about.get("prologue") and about.get("dtype") in _INDEX_DTYPES:
                                holding[arg] = None
                value["nodes"][stage] = list(holding)


def _pieces(
    dump: Dump, stages: dict[str, list[Node]], of: dict[str, Layers]
) -> list[dict[str, Any]]:
    if not dump.code:
        return []
    last = next(reversed(stages), "")  # the nearest to the code
    return find_pieces(dump.code, stages.get(last, []), of.get(last, Layers("")))


def _input_names(dump: Dump, stages: dict[str, list[Node]]) -> dict[str, str]:
    """What the user calls the graph inputs."""
    names = dump.graph.get("inputs", [])
    return {
        node["name"]: names[node["place"]]
        for node in stages.get("functional", [])
        if node["kind"] == "input" and 0 <= node.get("place", -1) < len(names)
    }
