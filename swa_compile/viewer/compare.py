"""Two dumps compared: what the passes did to the same model before and after a change."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

from swa_compile.viewer.dump import Dump, graph_folders

_FIGURES = (
    "translations_found",
    "translation_nodes",
    "translations_left",
    "invariants_hoisted",
    "stores_found",
    "stores_lowered",
    "cache_copies",
    "mapping_kernels",
    "partitions",
    "from_cache",
)


def compare(a: Path, b: Path) -> list[str]:
    """Lines that say how the dumps below `a` and `b` differ; none where they agree.

    Graphs are paired in order. What made the dumps (versions, options, times) is no difference;
    `describe_makers` says it.

    Raises:
        ValueError: where a folder holds no dump.
    """
    lines: list[str] = []
    pairs = zip_longest(_dumps(a), _dumps(b))
    for number, (old, new) in enumerate(pairs):
        if old is None or new is None:
            here = "only in the second" if old is None else "only in the first"
            lines.append(f"graph {number}: {here}")
            continue
        lines += [f"graph {number}: {line}" for line in _compare_graphs(old, new)]
    return lines


def describe_makers(a: Path, b: Path) -> list[str]:
    """What made the two dumps, where that differs: one line each."""
    first, second = (_dumps(folder)[0].graph.get("provenance", {}) for folder in (a, b))
    keys = [key for key in {**first, **second} if key != "time"]
    return [
        f"{key}: {first.get(key, '-')} -> {second.get(key, '-')}"
        for key in keys
        if first.get(key) != second.get(key)
    ]


def _dumps(folder: Path) -> list[Dump]:
    found = [Dump.read(graph) for graph in graph_folders(folder)]
    if not found:
        raise ValueError(f"no graph was dumped below {folder}")
    return found


def _compare_graphs(a: Dump, b: Dump) -> list[str]:
    if not a.report or not b.report:
        same = bool(a.report) == bool(b.report)
        return [] if same else [f"a pass raised in the {'second' if a.report else 'first'}"]
    lines = [
        f"{name.replace('_', ' ')}: {a.report.get(name)} -> {b.report.get(name)}"
        for name in _FIGURES
        if a.report.get(name) != b.report.get(name)
    ]
    lines += _compare_lists("value", *([_value(v) for v in d.report["values"]] for d in (a, b)))
    # A graph out of a compile cache may not know its lines: then they are no difference.
    known = all(refusal["source"] for d in (a, b) for refusal in d.report["refused"])
    lines += _compare_lists(
        "refusal", *([_refusal(r, known) for r in d.report["refused"]] for d in (a, b))
    )
    names = list(dict.fromkeys(s["name"] for d in (a, b) for s in d.graph["stages"]))
    for name in names:
        old, new = (d.stage(name) for d in (a, b))
        if not old or not new:
            lines.append(f"stage {name}: only in the {'second' if new else 'first'}")
            continue
        before, after = _ops(old), _ops(new)
        for op in sorted(before | after):
            if before[op] != after[op]:
                lines.append(f"stage {name}: {op} {before[op]} -> {after[op]}")
    return lines


def _compare_lists(what: str, a: list[str], b: list[str]) -> list[str]:
    old, new = Counter(a), Counter(b)
    return [
        *(f"{what} gone: {text}" for text in (old - new).elements()),
        *(f"{what} new: {text}" for text in (new - old).elements()),
    ]


def _value(value: dict[str, Any]) -> str:
    shape = ", ".join(map(str, value["shape"]))
    return f"{value['mapping']}[{value['loc']}] {value['dtype']}[{shape}] used {value['uses']}x"


def _refusal(refusal: dict[str, Any], located: bool) -> str:
    where = f" at {refusal['source']}" if located else ""
    return f"{refusal['code']}{where}"


def _ops(nodes: list[dict[str, Any]]) -> Counter[str]:
    return Counter(node["target"] for node in nodes if node["op"] == "call_function")
