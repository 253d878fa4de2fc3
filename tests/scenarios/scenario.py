"""A scenario: what goes in, the forward, its reference, and the work that the passes must report.

    @scenario("A2")
    def test_all_layers_share_one_translation():
        ...
        return Scenario(inputs, forward, reference, Counts(found=46, nodes=1, values=1))

The test that this makes runs the forward with each engine, compares every output and every row of
every cache with the reference, and the report with the counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import swa_compile


@dataclass(frozen=True)
class Counts:
    """What the report of a graph has to say.

    Attributes:
        found, nodes, values, left: translations as written, their nodes after the hoist, distinct
            values, and nodes outside the prologue.
        refused: codes, in order.
        stores: found and lowered.
        invariants: further index computations that were moved or merged; None for any number.
    """

    found: int
    nodes: int
    values: int
    left: int = 0
    refused: tuple[str, ...] = ()
    stores: tuple[int, int] = (0, 0)
    invariants: int | None = None

    @classmethod
    def of(cls, report: swa_compile.GraphReport) -> Counts:
        """What `report` says."""
        return cls(
            report.translations_found,
            report.translation_nodes,
            len(report.values),
            report.translations_left,
            tuple(refusal.code for refusal in report.refused),
            (report.stores_found, report.stores_lowered),
            report.invariants_hoisted,
        )


@dataclass
class Scenario:
    """See the module's docstring.

    Attributes:
        inputs: keyword arguments of the forward: tensors, numbers, None, and lists of them. Those
            with "cache" in their name are caches.
        forward: the code to compile; several are compiled one by one, and called in turn.
        reference: the same over NumPy copies, which it writes in place; returns the outputs.
        counts: what each compiled graph reports; one per graph, in order, or one for all.
        calls_of: how often the lowered graph of the first compilation calls an operator.
        then: edits of `inputs`, each followed by one more call of what was compiled.
        graphs: how many graphs all calls together compile.
        sinks: index of the sink rows of a cache by the name of its input; row 0 by default.
        check: called after each call with (inputs, outputs), for what values do not show.
        check_graph: called with the text of the lowered graph.
        atol: tolerance where floating-point sums may be taken in another order.
        dynamic, options: of `torch.compile`.
    """

    inputs: dict[str, Any]
    forward: Callable[..., Any] | Sequence[Callable[..., Any]]
    reference: Callable[..., Any] | Sequence[Callable[..., Any]]
    counts: Counts | Sequence[Counts]
    calls_of: dict[str, int] = field(default_factory=dict)
    then: Sequence[Callable[[dict[str, Any]], None]] = ()
    graphs: int = 1
    sinks: dict[str, Any] = field(default_factory=dict)
    check: Callable[[dict[str, Any], Any], None] | None = None
    check_graph: Callable[[str], None] | None = None
    atol: float = 0.0
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)


def scenario(
    *rows: str, inductor: bool = False, over: Sequence[Any] = ()
) -> Callable[[Callable[..., Scenario]], Callable[..., None]]:
    """Make a test of a function that builds a `Scenario`.

    Args:
        rows: names of the scenario in the table.
        inductor: run it through the engine "swa", too, which takes seconds.
        over: build one scenario for each of these, given as the argument.
    """
    engines: list[Any] = ["eager", "swa_eager"]
    if inductor:
        engines.append(pytest.param("swa", marks=pytest.mark.inductor))

    def decorate(build: Callable[..., Scenario]) -> Callable[..., None]:
        def with_cases(case, engine, tmp_path, record_property):
            name = f"{build.__name__} [{case}]"
            record_property("scenario", line(name, engine, run(build(case), engine, tmp_path)))

        def without_cases(engine, tmp_path, record_property):
            reports = run(build(), engine, tmp_path)
            record_property("scenario", line(build.__name__, engine, reports))

        def line(name, engine, reports):
            counts = [Counts.of(report).__dict__ for report in reports]
            return json.dumps([",".join(rows), name, engine, counts])

        made = with_cases if over else without_cases
        made.__name__, made.__doc__ = build.__name__, build.__doc__
        made.__module__ = build.__module__
        if over:
            made = pytest.mark.parametrize("case", over, ids=str)(made)
        return pytest.mark.parametrize("engine", engines)(made)

    return decorate


def run(scenario: Scenario, engine: str, folder: Path) -> list[swa_compile.GraphReport]:
    """All calls of `scenario` with `engine`, each compared; the reports of what was compiled."""
    torch._dynamo.reset()
    forwards, references = listed(scenario.forward), listed(scenario.reference)
    callables = [
        compile_with(engine, forward, folder, scenario.dynamic, **scenario.options)
        for forward in forwards
    ]
    inputs = scenario.inputs
    with torch.no_grad(), swa_compile.collect() as reports:
        for i, edit in enumerate((None, *scenario.then)):
            if edit is not None:
                edit(inputs)
            arrays = arrays_of(inputs)
            outputs = callables[i % len(callables)](**inputs)
            wanted = references[i % len(references)](**arrays)
            compare(f"{engine}, call {i}", scenario, inputs, outputs, arrays, wanted)
            if scenario.check is not None:
                scenario.check(inputs, outputs)
    if engine == "eager":
        return []
    assert len(reports) == scenario.graphs, f"{len(reports)} graphs, not {scenario.graphs}"
    wanted_counts = listed(scenario.counts)
    for i, report in enumerate(reports):
        check_counts(wanted_counts[i % len(wanted_counts)], report)
    if reports[0].from_cache:  # no pass ran, so no stage was written
        return reports
    text = lowered_text(reports[0])
    for op, wanted in scenario.calls_of.items():
        assert calls(text, op) == wanted, f"{calls(text, op)} calls of {op}, not {wanted}\n{text}"
    if scenario.check_graph is not None and engine == "swa_eager":
        scenario.check_graph(text)
    return reports


def compile_with(
    engine: str,
    forward: Callable[..., Any],
    folder: Path | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`forward` for `engine`."""
    if engine == "eager":
        return forward
    if folder is not None:
        options["dump_dir"] = str(folder)
    return torch.compile(forward, backend=engine, fullgraph=True, dynamic=dynamic, options=options)


def listed(one_or_many: Any) -> Sequence[Any]:
    return one_or_many if isinstance(one_or_many, (list, tuple)) else [one_or_many]


def refused(
    engine: str, forward: Callable[..., Any], inputs: dict[str, Any], *words: str, **options: Any
) -> str:
    """Call `forward`, which has to raise an error that says `words` and to leave the caches alone.

    Returns:
        The messages of the whole exception chain.
    """
    torch._dynamo.reset()
    before = arrays_of(inputs)
    with torch.no_grad(), pytest.raises(Exception, match=r".") as caught:
        compile_with(engine, forward, **options)(**inputs)
    error: BaseException | None = caught.value
    parts: list[str] = []
    while error is not None and len(parts) < 10:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    message = "\n".join(parts)
    for word in words:
        assert word in message, f"{engine}: '{word}' is not in\n{message}"
    for name, value in before.items():
        got, want = (pytree.tree_leaves(x) for x in (arrays_of(inputs[name]), value))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(f"{engine}: {name} ({i})", a, b, None, 0.0)
    return message


def check_counts(wanted: Counts, report: swa_compile.GraphReport) -> None:
    got = Counts.of(report)
    for name, value in wanted.__dict__.items():
        if value is not None:
            found = getattr(got, name)
            assert found == value, f"{name} is {found}, not {value}:\n{report.summary()}"
    if report.cache_copies is not None:
        assert report.cache_copies == 0, f"{report.cache_copies} caches are copied"


def lowered_text(report: swa_compile.GraphReport) -> str:
    """The graph as the passes left it."""
    assert report.dump is not None
    return Path(report.dump, "02-lowered.py").read_text()


def calls(text: str, op: str) -> int:
    """How often a graph's `text` calls `op`; "cast:int32" stands for casts to int32."""
    if op.startswith("cast:"):
        casts = r"= torch\.ops\.(aten\._to_copy|prims\.convert_element_type)\.default\(.*torch\."
        return len(re.findall(casts + re.escape(op[len("cast:") :]) + r"\b", text))
    return text.count(f"= torch.ops.{op}(")


def arrays_of(inputs: Any) -> Any:
    """NumPy copies of the tensors in `inputs`; dtypes that NumPy lacks become float32."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        known = leaf.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        return np.array((leaf if known else leaf.float()).numpy())

    return pytree.tree_map(copy, inputs)


def compare(
    who: str, scenario: Scenario, inputs: Any, outputs: Any, arrays: Any, wanted: Any
) -> None:
    """Every output, and every row of every input but the sinks."""
    for name, value in inputs.items():
        sink = scenario.sinks.get(name, 0) if "cache" in name else None
        got, want = (pytree.tree_leaves(x) for x in (arrays_of(value), arrays[name]))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(f"{who}: {name} ({i})", a, b, sink, scenario.atol)
    got, want = pytree.tree_leaves(arrays_of(outputs)), pytree.tree_leaves(wanted)
    assert len(got) == len(want), f"{who}: {len(got)} outputs, not {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        same(f"{who}: output {i}", a, b, None, max(scenario.atol, 1e-5))


def same(what: str, got: Any, want: Any, sink: Any, atol: float) -> None:
    """Raise where two arrays (or numbers) differ, `sink` left out."""
    if not isinstance(got, np.ndarray):
        assert got == want, what
        return
    want = np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    if want.dtype.kind != "f":
        atol = 0.0
        assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    differ = ~np.isclose(got, want, rtol=0, atol=atol)
    if sink is not None and differ.size:
        differ[sink] = False
    places = np.argwhere(differ)
    assert not len(places), f"{what} differs at {places[:6].tolist()} ({len(places)} places)"
