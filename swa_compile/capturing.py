"""Captures of what one call of the `swa` backend compiles."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from swa_compile.bucket import Inputs
from swa_compile.call_sizes import CallSizes
from swa_compile.capture_file import copy_to
from swa_compile.captures import Captures, Skip
from swa_compile.cudagraphs import CapturedGraph
from swa_compile.inductor import InnerCode, can_wrap
from swa_compile.options import Options
from swa_compile.passes import GraphReport, HoistError
from swa_compile.passes.model_source import source_line
from swa_compile.pieces import Piece
from swa_compile.recording import recorder_for


def with_wrapping(options: Options) -> Options:
    """`options`, with torch's cudagraph trees where it lacks what captures of ours need."""
    if options.cudagraphs not in ("full", "piecewise", "auto") or can_wrap():
        return options
    if options.cudagraphs == "auto" and not torch.cuda.is_available():
        return options
    warnings.warn(
        f"torch {torch.__version__} has not what captures of ours need; "
        f"cudagraphs={options.cudagraphs!r} uses torch's cudagraph trees ('inductor')",
        stacklevel=3,
    )
    return replace(options, cudagraphs="inductor")


@dataclass
class Capturing:
    """What is captured of one Dynamo graph.

    Attributes:
        sizes: the sizes of a call, from its arguments.
        obstacle: an operator that says itself that it must not be captured, and its line.
        graphs: the code that Inductor made, one for each graph; usually one.
        records: of all graphs, also of those that are not captured.
    """

    options: Options
    device: torch.device
    inputs: Inputs
    sizes: CallSizes
    obstacle: tuple[str, str] | None = None
    graphs: list[CapturedGraph] = field(default_factory=list)
    records: list[Captures] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        names: Sequence[str],
        options: Options,
    ) -> Capturing | None:
        """None where nothing can or shall be captured."""
        if options.cudagraphs not in ("full", "piecewise", "auto"):
            return None
        device = _device(example_inputs)
        if device is None:
            return None
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        sources = [next((source_line(user) for user in node.users), "") for node in placeholders]
        inputs = Inputs(names=list(names), sources=sources)
        sizes = CallSizes(gm, names, options.split_ops)
        return cls(options, device, inputs, sizes, _unsafe(gm))

    def wrap(self, code: InnerCode) -> Callable[..., Any]:
        """`code`, captured."""
        options = self.options
        recorder = recorder_for(self.device) if code.inference else None
        if recorder is None:
            record = Captures(options.cudagraphs)
            self.records.append(record)
            why = "a graph with gradients is not captured; compile and call under torch.no_grad()"
            skip = Skip(why)
            record.skip(skip)
            if options.strict:
                raise HoistError(f"{skip} (strict=True)")
            if options.cudagraphs != "auto" or options.capture_sizes:
                warnings.warn(str(skip), stacklevel=2)
            return code.run
        pieces = [Piece(index, run) for index, run in enumerate(code.pieces)]
        code.replace_pieces(list(pieces))
        graph = CapturedGraph(
            code.run,
            recorder,
            pieces=pieces,
            calls=code.calls,
            inputs=replace(self.inputs, static=code.static, written=code.written),
            mode=options.cudagraphs,
            obstacle=self.obstacle,
            capture_sizes=options.capture_sizes,
            strict=options.strict,
        )
        self.graphs.append(graph)
        self.records.append(graph.captures)
        return graph

    def front(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, telling the captured graphs inside the sizes of each call."""
        if not self.graphs:
            return compiled
        graphs, sizes_of = self.graphs, self.sizes

        def call(*args: Any) -> Any:
            sizes = sizes_of(args)
            for graph in graphs:
                graph.sizes = sizes
            return compiled(*args)

        return call

    def attach(self, reports: Sequence[GraphReport]) -> list[GraphReport]:
        """`reports`, each with the record of its graph, of which its dump has a copy."""
        if len(reports) != len(self.records):
            return list(reports)
        for report, record in zip(reports, self.records, strict=True):
            if report.dump is not None:
                copy_to(Path(report.dump), record)
        for graph in self.graphs:  # the last counts, when the graph goes or the process ends
            weakref.finalize(graph, graph.captures.write)
        return [
            replace(report, captures=record)
            for report, record in zip(reports, self.records, strict=True)
        ]


def _unsafe(gm: GraphModule) -> tuple[str, str] | None:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            overload = getattr(node.target, "default", node.target)
            if tag is not None and tag in getattr(overload, "tags", ()):
                return f"{overload} is tagged cudagraph_unsafe", source_line(node)
    return None


def _device(values: Sequence[Any]) -> torch.device | None:
    """The one device that can be captured on, of the tensors `values`."""
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    able = [device for device in devices if device.type != "cpu"]
    return able[0] if len(able) == 1 and able[0].type == "cuda" else None
