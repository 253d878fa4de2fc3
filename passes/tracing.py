"""The stages in torch's own channels: its logs, its structured trace, and depyf's folder.

The one place that touches the private interfaces of these. What a version of torch or depyf
lacks or refuses costs the trace, never the compilation.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule

log = logging.getLogger("swa_compile")


def register_logger() -> None:
    """Make `TORCH_LOGS="+swa_compile"` and `torch._logging.set_logs` know the package's logger."""
    try:
        from torch._logging._internal import register_log

        register_log("swa_compile", "swa_compile")
    except Exception as error:
        log.debug("torch's registry of loggers is not there: %s", error)


def trace_stage(name: str, graph: Graph) -> None:
    """Hand `graph`, at stage `name`, to whoever listens. Costs nothing where nobody does."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("stage %s\n%s", name, _text(graph))
    _structured("graph_dump", {"name": f"swa_{name}"}, lambda: _text(graph))
    _show_to_depyf(name, graph)


def trace_report(report: dict[str, Any], summary: str) -> None:
    """Hand a graph's report, as `GraphReport.to_dict` and `summary` give it, to the listeners."""
    log.info("%s", summary)
    metadata = {"name": "swa_report", "encoding": "json"}
    _structured("artifact", metadata, lambda: json.dumps(report, indent=2))


def print_graph(graph: Graph) -> str:
    """`graph` as FX prints it, with shapes, strides, devices and source lines."""
    return with_module(
        graph,
        lambda module: module.print_readable(
            print_output=False, include_stride=True, include_device=True
        ),
    )


def with_module(graph: Graph, read: Callable[[GraphModule], Any]) -> Any:
    """`read` of a module around `graph`, which stays the graph of the module it belongs to."""
    owner = graph.owning_module
    try:
        return read(GraphModule(owner or torch.nn.Module(), graph))
    finally:
        graph.owning_module = owner


def _text(graph: Graph) -> str:
    try:
        return str(print_graph(graph))
    except Exception as error:  # whatever the printer met must not stop a compilation
        return f"# this graph cannot be printed: {error}"


def _structured(kind: str, metadata: dict[str, str], payload: Callable[[], str]) -> None:
    try:
        from torch._logging._internal import trace_structured

        trace_structured(kind, metadata_fn=lambda: metadata, payload_fn=payload)
    except Exception as error:
        log.debug("torch's structured trace took no %s: %s", metadata["name"], error)


def _show_to_depyf(name: str, graph: Graph) -> None:
    """A file of its own for the stage, where the caller stands inside `depyf.prepare_debug`."""
    depyf = sys.modules.get("depyf.explain.global_variables")
    if depyf is None:  # never imported, so nobody is inside
        return
    try:
        if not depyf.data.get("is_inside_prepare_debug"):
            return
        from torch._dynamo import utils

        lazy_format_graph_code = utils.lazy_format_graph_code  # type: ignore[attr-defined]
        # depyf patches this function of torch to write what is formatted to its folder.
        with_module(graph, lambda module: lazy_format_graph_code(f"swa {name}", module))
    except Exception as error:
        warnings.warn(f"depyf did not take stage '{name}': {error}", stacklevel=2)
