"""The `torch.compile` backends `swa` and `swa_eager`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from functorch.compile import aot_module_simplified, make_boxed_func
from torch.fx import GraphModule

from swa_compile.capturing import Capturing, with_wrapping
from swa_compile.collecting import settle
from swa_compile.dumping import Captured, capture, complete_dump
from swa_compile.generated_code import (
    cache_copies,
    late_mapping_kernels,
    mapping_kernels,
    partition_count,
)
from swa_compile.inductor import Generated, captured_code, compile_with_inductor
from swa_compile.naming import input_names, name_inputs, with_names
from swa_compile.options import Options
from swa_compile.passes import GraphReport, HoistError, HoistPipeline, pipeline
from swa_compile.passes.report import deliver, sink, take_undelivered
from swa_compile.passes.subgraphs import children
from swa_compile.sources import call_sources, with_sources

Compiled = Callable[..., Any]


def swa(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """`torch.compile(model, backend="swa")`: AOTAutograd, the hoist, then Inductor.

    Args:
        gm, example_inputs: from Dynamo.
        options: see `Options`.
        mode: a mode of `torch.compile`, e.g. "max-autotune-no-cudagraphs"; its CUDA graphs are
            left to the option `cudagraphs`.

    Raises:
        OptionError: for options that are unknown or refused.
        HoistError: with `strict`, where the promise is not kept.
    """
    chosen = with_wrapping(Options.of(options))
    # Read ahead: compile_fx takes ownership of gm.
    names = input_names(gm)
    capturing = Capturing.of(gm, example_inputs, names, chosen)
    if capturing is None:
        _tell_skipped_capture(chosen, "its inputs are not on one CUDA device")
    generated: list[Generated] = []
    sources = call_sources(gm)
    captured = capture(gm, names, chosen)
    with (
        _reports(chosen, names, generated, captured, capturing, sources),
        captured_code(generated),
    ):
        wrap = None if capturing is None else capturing.wrap
        compiled = compile_with_inductor(gm, example_inputs, chosen, mode, wrap)
    return compiled if capturing is None else capturing.front(compiled)


def swa_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """`torch.compile(model, backend="swa_eager")`: the same passes, then plain interpretation.

    Compiles in a fraction of a second and runs the operators that eager code runs, so a
    difference from eager code is the passes' doing. Stores copy their cache here: for tests and
    for looking at graphs, not for speed.

    Raises:
        OptionError: for options that are unknown or refused.
        HoistError: with `strict`, where a translation stays in the layer code.
    """
    chosen = Options.of(options)
    _tell_skipped_capture(chosen, "'swa_eager' interprets the graph")
    hoist = pipeline(chosen)
    names = input_names(gm)
    captured = capture(gm, names, chosen)

    def interpret(graph: GraphModule, _: Sequence[Any]) -> Compiled:
        with _reports(chosen, names, [], captured):
            _apply(hoist, graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return aot_module_simplified(
        gm,
        example_inputs,
        fw_compiler=interpret,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        # Input mutations as `copy_` in the graph, as Inductor has them.
        keep_inference_input_mutations=True,
    )


def backend(name: str = "swa", /, **options: Any) -> Compiled:
    """The backend with `options` bound, for `torch.compile(model, backend=...)`.

    Raises:
        OptionError: at once, where `torch.compile(..., options=...)` says it at the first call.
    """
    chosen = Options.of(options)
    compilers = {"swa": swa, "swa_eager": swa_eager}
    compiler = compilers[name]

    def bound(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return compiler(gm, example_inputs, options=chosen, **kwargs)

    return bound


def _apply(hoist: HoistPipeline, module: GraphModule) -> None:
    """The passes on the subgraphs that `module` calls, then on it, as Inductor does."""
    for child in children(module.graph).values():
        _apply(hoist, child)
        child.recompile()
    hoist(module.graph)


def _tell_skipped_capture(options: Options, why: str) -> None:
    """Warn (`strict`: raise) where sizes are to be captured and nothing will be."""
    explicit = options.capture_sizes or options.cudagraphs in ("full", "piecewise")
    if options.cudagraphs == "inductor" or not explicit:
        return
    asked = (
        f"capture_sizes={options.capture_sizes}"
        if options.capture_sizes
        else f"cudagraphs={options.cudagraphs!r}"
    )
    message = f"CAPTURE_SKIPPED: {asked} was asked for, and nothing is captured: {why}"
    if options.strict:
        raise HoistError(f"{message} (strict=True)")
    warnings.warn(message, stacklevel=3)


@contextmanager
def _reports(
    options: Options,
    names: list[str],
    generated: list[Generated],
    captured: Captured | None,
    capturing: Capturing | None = None,
    sources: Sequence[str] = (),
) -> Iterator[None]:
    """Complete the reports of what is compiled inside and hand them to the collectors.

    `generated` holds, after the block, what Inductor made of each graph in the same order.
    """
    settle()  # what stock Inductor took from its cache ahead of this
    fresh: list[GraphReport] = []
    failed = True
    try:
        with sink(fresh, alone=True):
            yield
        failed = False
    except Exception as error:
        name_inputs(error, names)
        raise
    finally:
        reports = [*fresh, *take_undelivered()]
        reports = [with_sources(r, sources) if r.from_cache else r for r in reports]
        # Where some graph gave no code, nobody knows which.
        same = len(generated) == len(reports)
        paired = generated if same else [None] * len(reports)
        reports = [
            _complete(report, names, made, captured, options)
            for report, made in zip(reports, paired, strict=True)
        ]
        if capturing is not None:
            reports = capturing.attach(reports)
        for report in reports:
            deliver(report)
    if options.strict and not failed:
        for report in reports:
            _refuse_broken_promises(report)


def _refuse_broken_promises(report: GraphReport) -> None:
    """Raise `HoistError` where the generated code does not do what the graph said."""
    if report.cache_copies:
        caches = ", ".join(cache.name for cache in report.caches)
        raise HoistError(
            f"CACHE_COPIED: the compiled code copies {report.cache_copies} KV caches "
            f"(strict=True); caches of this graph: {caches}"
        )
    if report.mapping_kernels_late and not report.refused:
        raise HoistError(
            f"MAPPING_READ_LATE: {report.mapping_kernels_late} kernels of the compiled code read "
            "the mapping behind the first use of a KV cache (strict=True)"
        )


def _complete(
    report: GraphReport,
    names: list[str],
    generated: Generated | None,
    captured: Captured | None,
    options: Options,
) -> GraphReport:
    """`report` with the user's names and what only the generated code tells; its dump finished."""
    if generated is not None:
        code = generated.code
        mappings = [value.mapping for value in report.values]
        report = replace(
            report,
            cache_copies=cache_copies(code, report.caches),
            mapping_kernels=mapping_kernels(code, mappings),
            mapping_kernels_late=late_mapping_kernels(
                code, mappings, [cache.name for cache in report.caches]
            ),
            partitions=partition_count(code),
        )
    return complete_dump(with_names(report, names), captured, generated, options)
