"""The record of what the passes did to one graph, and how it reaches those who collect it.

A report has to outlive the pass: on a warm start the compile cache serves the code and no pass
runs. Inductor keeps, with every cached graph, how much its own counters rose while the graph was
compiled, and adds the same amounts again on a hit. So the report travels as the *name* of such a
counter, in JSON: it sits in the cached artifact itself, whatever folder or machine that is moved
to, and cannot go stale against the code beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch._dynamo.utils import counters

_COUNTER_PREFIX = "swa_compile_report "

# Tables of torch's counters. Inductor keeps the first with each cached graph. The others say for
# how many of its counts the passes ran in this process, and how many of those a collector got.
_RECORDED, _RAN, _DELIVERED = "inductor", "swa_compile ran", "swa_compile delivered"

# The lists that receive reports in this context, outermost first.
_sinks: ContextVar[tuple[list[GraphReport], ...]] = ContextVar("swa_compile_sinks", default=())


@dataclass(frozen=True)
class Value:
    """One distinct translated value.

    Attributes:
        mapping, loc: names of the graph nodes that are translated through and translated.
        shape: of the translated value; a str is a symbolic size.
        dtype: of `loc`, e.g. "int64" (the translation itself is int64).
        uses: how many calls of translation ops became this value.
        source: "file:line" of the first of them, "" where the trace does not know it.
        code: of the refusal, "" for a value of the one node.
        call: which call of the trace the first of them is, from 0; -1 where that is not known.
    """

    mapping: str
    loc: str
    shape: tuple[int | str, ...]
    dtype: str
    uses: int
    source: str = ""
    code: str = ""
    call: int = -1


@dataclass(frozen=True)
class Refusal:
    """A translated value that could not join the one node, or stays where it was.

    Attributes:
        code: MAPPING_WRITTEN, LOC_FROM_ACTIVATIONS, MAPPING_FROM_ACTIVATIONS, IMPURE_PRODUCER,
            IN_SUBGRAPH or ESCAPES.
        message: why, and what the author can do.
        node: name of the first call in the graph.
        source: "file:line" of that call, "" where the trace does not know it.
        call: which call of the trace it is, from 0; -1 where that is not known.
    """

    code: str
    message: str
    node: str
    source: str
    call: int = -1


@dataclass(frozen=True)
class Cache:
    """One KV cache that a store of the graph writes.

    Attributes:
        name: of the graph input.
        shape, dtype: of the whole input; a str is a symbolic size.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class GraphReport:
    """What happened to one compiled graph.

    Attributes:
        translations_found: calls of marked translation ops, subgraphs included.
        translations_left: translation nodes that stand outside the prologue afterwards.
        translation_nodes: after the hoist: one for all values that could be hoisted together,
            plus one per refused value.
        values: the distinct translated values, refused ones included.
        refused: values that could not be hoisted into the one node, with the reason.
        invariants_hoisted: nodes moved to the prologue or merged there, beyond the translations.
        stores_found, stores_lowered: calls of marked stores, and how many became `index_put`.
        rows_fused: lowered stores that one kernel does together with what leads up to them.
        caches: the KV caches that the stores write.
        cache_copies: copies of KV caches that the compiled code makes; None where no code
            was generated (`swa_eager`, or the passes alone).
        collectives: the collective operators of the graph in order, each with the arguments that
            are no tensors, its group left out: what ranks have to agree on.
        mapping_kernels: kernel calls of the compiled code that are given a mapping: as many as the
            prologue needs, whatever the number of layers; None like `cache_copies`.
        mapping_kernels_late: those of them that stand behind the first call that takes a cache; 0
            unless a value was refused.
        partitions: pieces that Inductor cut the graph into; None where it was not asked to.
        from_cache: the compiled code came from a compile cache and the passes did not run.
        dump: folder that holds the text of the stages, or None.
        inputs: the graph inputs named in this report, each with its place among the arguments of
            the compiled callable (where AOTAutograd tells).
        captures: the live record of the CUDA graphs of this graph
            (`swa_compile.captures.Captures`), or None where none are made. It goes on counting, so
            it is not compared, and a report that is loaded has none.
    """

    translations_found: int = 0
    translations_left: int = 0
    translation_nodes: int = 0
    values: list[Value] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    invariants_hoisted: int = 0
    stores_found: int = 0
    stores_lowered: int = 0
    rows_fused: int = 0
    caches: list[Cache] = field(default_factory=list)
    cache_copies: int | None = None
    collectives: list[str] = field(default_factory=list)
    mapping_kernels: int | None = None
    mapping_kernels_late: int | None = None
    partitions: int | None = None
    from_cache: bool = False
    dump: str | None = None
    inputs: dict[str, int] = field(default_factory=dict)
    captures: Any = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: only dict, list, str, int, bool and None."""
        # The record of captures says itself what it holds: a call in another thread may add to it.
        data = asdict(replace(self, captures=None))
        data["captures"] = None if self.captures is None else self.captures.to_dict()
        return json.loads(json.dumps(data))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphReport:
        """The inverse of `to_dict`."""
        data = {**data, "captures": None}
        data["values"] = [
            Value(**{**value, "shape": tuple(value["shape"])}) for value in data["values"]
        ]
        data["refused"] = [Refusal(**refusal) for refusal in data["refused"]]
        data["caches"] = [
            Cache(**{**cache, "shape": tuple(cache["shape"])}) for cache in data["caches"]
        ]
        return cls(**data)

    def summary(self) -> str:
        """A few readable lines, the first of which is the whole story."""
        if not self.translations_found and not self.stores_found:
            lines = ["nothing to hoist: no translation and no KV store in this graph"]
        else:
            lines = [
                f"{self.translations_found} translation{'s' * (self.translations_found != 1)} -> "
                f"{self.translation_nodes} "
                f"node{'s' * (self.translation_nodes != 1)} ({len(self.values)} distinct "
                f"value{'s' * (len(self.values) != 1)}, {self.translations_left} left in the layer "
                f"code); {self.stores_lowered} of {self.stores_found} stores lowered"
                + (f", {self.rows_fused} fused with what they store" if self.rows_fused else "")
            ]
        if self.invariants_hoisted:
            lines.append(f"{self.invariants_hoisted} further index computations moved or merged")
        for value in self.values:
            shape = ", ".join(map(str, value.shape))
            lines.append(
                f"  {value.mapping}[{value.loc}]  {value.dtype}[{shape}]  used {value.uses}x"
            )
        for refusal in self.refused:
            where = f" at {refusal.source}" if refusal.source else ""
            lines.append(f"  refused {refusal.code}{where} ({refusal.node}): {refusal.message}")
        if self.cache_copies:
            lines.append(f"  WARNING: the compiled code allocates {self.cache_copies} cache copies")
        if self.mapping_kernels is not None and self.values:
            lines.append(
                f"  {self.mapping_kernels} kernel call{'s' * (self.mapping_kernels != 1)} of the "
                "compiled code read the mapping"
            )
        if self.mapping_kernels_late and not self.refused:
            lines.append(f"  WARNING: {self.mapping_kernels_late} of them behind the prologue")
        if self.partitions is not None:
            lines.append(f"  {self.partitions} partitions")
        if self.captures is not None:
            lines += [f"  {line}" for line in self.captures.summary().splitlines()]
        if self.from_cache:
            lines.append("  (from the compile cache)")
        return "\n".join(lines)


def publish(report: GraphReport) -> None:
    """Record `report` with the graph being compiled and give it to the active collectors."""
    key = _counter(report)
    counters[_RECORDED][key] += 1
    counters[_RAN][key] += 1
    if _sinks.get():
        counters[_DELIVERED][key] += 1
    deliver(report)


def retract(report: GraphReport) -> None:
    """Take back a published report whose graph turned out to be part of another one."""
    key = _counter(report)
    for table in (_RECORDED, _RAN, _DELIVERED):
        counters[table][key] -= 1
        if counters[table][key] <= 0:
            del counters[table][key]
    for sink in _sinks.get():
        for i in reversed(range(len(sink))):
            if sink[i] is report:
                del sink[i]
                break


def take_undelivered() -> list[GraphReport]:
    """The reports of all graphs that were compiled or taken from a cache and that no collector got.

    Each is returned once. Those that come from a cache say so, and have no source lines: they would
    be those of the process that compiled.
    """
    found: list[GraphReport] = []
    table, ran, delivered = counters[_RECORDED], counters[_RAN], counters[_DELIVERED]
    for key in [key for key in table if key.startswith(_COUNTER_PREFIX)]:
        report = GraphReport.from_dict(json.loads(key[len(_COUNTER_PREFIX) :]))
        recorded, passes, seen = table.pop(key), ran.pop(key, 0), delivered.pop(key, 0)
        found += [report] * (passes - seen)
        found += [_from_cache(report)] * (recorded - passes)
    return found


@contextmanager
def sink(reports: list[GraphReport], *, alone: bool = False) -> Iterator[None]:
    """Have `publish` append to `reports` inside the block; `alone`: and to no outer list."""
    outer = () if alone else _sinks.get()
    token = _sinks.set((*outer, reports))
    try:
        yield
    finally:
        _sinks.reset(token)


def deliver(report: GraphReport) -> None:
    """Give `report` to the active collectors without recording it."""
    for target in _sinks.get():
        target.append(report)


def _from_cache(report: GraphReport) -> GraphReport:
    values = [replace(value, source="") for value in report.values]
    refused = [replace(refusal, source="") for refusal in report.refused]
    return replace(report, values=values, refused=refused, from_cache=True)


def _counter(report: GraphReport) -> str:
    # Where this process put a dump means nothing to the process that finds the cached code.
    data = {**report.to_dict(), "dump": None}
    return _COUNTER_PREFIX + json.dumps(data, separators=(",", ":"))
