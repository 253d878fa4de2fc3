"""The report as a text to read in a terminal: before and after, refusals, what to do."""

from __future__ import annotations

import linecache
import textwrap

from swa_compile.explaining import Report
from swa_compile.passes import GraphReport, Refusal
from swa_compile.viewer.advice import ADVICE

_AROUND = 1  # lines of source ahead of a refused call and behind it
_WIDTH = 96


def narrate(report: Report) -> str:
    """`report` as text: a line on the whole, then each graph, with refusals and their source."""
    head = f"{len(report.graphs)} graph{'s' * (len(report.graphs) != 1)}"
    head += f", {report.graph_breaks} graph break{'s' * (report.graph_breaks != 1)}"
    lines = [head]
    if report.graph_breaks:
        lines.append("  no hoist reaches across a graph break; fullgraph=True says where it is")
    for number, graph in enumerate(report.graphs):
        lines += ["", *narrate_graph(graph, f"graph {number}")]
    return "\n".join(lines)


def narrate_graph(report: GraphReport, title: str = "graph") -> list[str]:
    """The lines for one graph."""
    cached = "  (from the compile cache)" if report.from_cache else ""
    lines = [f"{title}: {_sentence(report)}{cached}"]
    hoisted = [value for value in report.values if not value.code]
    if hoisted:
        lines.append("  before                            after, once, at the start of the forward")
        for value in hoisted:
            shape = ", ".join(map(str, value.shape))
            calls = f"{value.uses} call{'s' * (value.uses != 1)} in the layers"
            lines.append(f"  {calls:<32}  {value.mapping}[{value.loc}]  {value.dtype}[{shape}]")
    for refusal in report.refused:
        lines += ["", *narrate_refusal(refusal)]
    facts = [
        (report.invariants_hoisted, "further index computations moved or merged"),
        (report.cache_copies, "buffers of a KV cache's size in the compiled code"),
        (report.mapping_kernels, "kernel calls that read the mapping"),
        (report.partitions, "partitions"),
        (
            report.captures.captures if report.captures else None,
            "CUDA graphs (a size is recorded when it is met again)",
        ),
    ]
    if any(count is not None for count, _ in facts):
        lines.append("")
    lines += [f"  {count:>6}  {what}" for count, what in facts if count is not None]
    if report.captures:
        for skip in report.captures.skipped:
            lines += textwrap.wrap(
                str(skip), _WIDTH, initial_indent="          ", subsequent_indent="          "
            )
        if report.captures.further_skips:
            lines.append(f"          and {report.captures.further_skips} more skips")
    if report.dump:
        lines.append(f"  dump: {report.dump}")
    return lines


def narrate_refusal(refusal: Refusal) -> list[str]:
    """One refusal: code, reason, the source around it, and what to do."""
    where = f" at {refusal.source}" if refusal.source else ""
    lines = [f"  refused {refusal.code}{where}"]
    lines += textwrap.wrap(
        refusal.message, _WIDTH, initial_indent="    why: ", subsequent_indent="         "
    )
    lines += [f"    {line}" for line in source_excerpt(refusal.source)]
    advice = ADVICE.get(refusal.code)
    if advice:
        lines += textwrap.wrap(
            advice, _WIDTH, initial_indent="    do:  ", subsequent_indent="         "
        )
    return lines


def source_excerpt(source: str) -> list[str]:
    """The lines around "file:line", numbered, the line itself marked; none where it is not read."""
    path, _, number = source.rpartition(":")
    if not path or not number.isdigit():
        return []
    at = int(number)
    found = []
    for line in range(max(1, at - _AROUND), at + _AROUND + 1):
        text = linecache.getline(path, line)
        if text:
            mark = ">" if line == at else " "
            found.append(f"{mark} {line:>5} | {text.rstrip()}".rstrip())
    return found


def strict_failures(report: GraphReport) -> list[str]:
    """Why `strict=True` would raise on this graph; empty where it would not."""
    failures = []
    if report.translations_left:
        codes = ", ".join(sorted({refusal.code for refusal in report.refused}))
        left = "1 translation stays"
        if report.translations_left != 1:
            left = f"{report.translations_left} translations stay"
        failures.append(f"{left} in the layer code ({codes})")
    if report.cache_copies:
        failures.append(f"CACHE_COPIED: {report.cache_copies} buffers of a KV cache's size")
    return failures


def _sentence(report: GraphReport) -> str:
    if not report.translations_found and not report.stores_found:
        return "nothing to hoist: no translation and no KV store in this graph"
    nodes = report.translation_nodes
    found = report.translations_found
    text = f"{found} translation{'s' * (found != 1)} -> {nodes} node{'s' * (nodes != 1)}"
    if report.translations_left:
        text += f", {report.translations_left} left in the layer code"
    return f"{text}; {report.stores_lowered} of {report.stores_found} stores lowered"
