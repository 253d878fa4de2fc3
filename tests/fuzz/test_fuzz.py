"""Whole programs, drawn at random, compiled and compared with NumPy row by row.

The programs are the same in every run. For a campaign, with new seeds and that many programs (a
hundredth of it through Inductor)::

    SWA_FUZZ_PROGRAMS=2000 pytest tests/fuzz

A failure ends with the smallest program that was found to fail: its inputs and its source.
"""

import os
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import swa_compile

from .steps import programs

CAMPAIGN = int(os.environ.get("SWA_FUZZ_PROGRAMS", "0"))
COMMON = {
    "deadline": None,
    "derandomize": not CAMPAIGN,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
OPTIONS = st.fixed_dictionaries(
    {"lower_stores": st.sampled_from([True, True, False]), "hoist_invariants": st.booleans()}
)


@given(programs(), OPTIONS, st.sampled_from([None, None, True]))
@settings(max_examples=CAMPAIGN or 120, **COMMON)
def test_interpreted_programs_do_what_numpy_does(program, options, dynamic):
    check(program, "swa_eager", options, dynamic)


@pytest.mark.inductor
@given(programs(), OPTIONS, st.sampled_from([None, True]))
@settings(max_examples=max(CAMPAIGN // 100, 3), **COMMON)
def test_inductors_programs_do_what_numpy_does(program, options, dynamic):
    check(program, "swa", options, dynamic)


def check(program, engine, options, dynamic):
    try:
        check_all(program, engine, options, dynamic)
    except Exception as error:
        # Inputs that are parts of an allocation: there torch's functionalization of custom ops
        # writes shifted rows, which the passes mend or refuse; and its views of such inputs,
        # given back as outputs, may be wrong.
        refused = "torch would write shifted rows" in str(error)
        if not program.shares_inputs() or not (refused or torch_is_wrong(program, engine, dynamic)):
            raise


def torch_is_wrong(program, engine, dynamic):
    """True where the program goes wrong without the passes."""
    torch._dynamo.reset()
    bases, arguments = program.tensors()
    stock = {"swa_eager": "aot_eager", "swa": "inductor"}[engine]
    try:
        call = torch.compile(program.function(), backend=stock, dynamic=dynamic)
        with torch.no_grad():
            compare(program, bases, call(*arguments), "torch")
    except Exception:
        return True
    return False


def check_all(program, engine, options, dynamic):
    torch._dynamo.reset()
    forward = program.function()
    bases, arguments = program.tensors()
    eager_bases, eager_arguments = program.tensors()
    with torch.no_grad():
        eager = forward(*eager_arguments)
        compare(program, eager_bases, eager, "eager code")
        with swa_compile.collect() as reports:
            call = torch.compile(
                forward, backend=engine, fullgraph=True, dynamic=dynamic, options=options
            )
            outputs = call(*arguments)
    compare(program, bases, outputs, engine)
    for i, (got, want) in enumerate(zip(outputs, eager, strict=True)):
        assert got.stride() == want.stride() or got.numel() < 2, f"strides of output {i}"
    got = sharing([*outputs, *arguments])
    want = sharing([*eager, *eager_arguments])
    assert got <= want, f"these outputs (then inputs) share storage: {sorted(got - want)}"
    check_report(program, reports)


def compare(program, bases, outputs, who):
    """Every element of every allocation but the sinks, and every output."""
    want = {name: array.copy() for name, array in program.live.items()}
    got = {
        name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype).numpy()
        for name, tensor in bases.items()
    }
    got = {name: array.copy() for name, array in got.items()}
    for source, _, base in program.caches:
        for arrays in (want, got):
            view = arrays[base][program.inputs[base][1]]
            eval(source, {base: view})[0] = 0
    for name, array in want.items():
        differ = np.argwhere(got[name] != array)
        assert not len(differ), f"{who}: {name} differs at {differ[:6].tolist()}"
    for i, (output, name) in enumerate(zip(outputs, program.outputs, strict=True)):
        array = program.values[name]
        assert tuple(output.shape) == array.shape, f"{who}: shape of output {i} ({name})"
        assert np.array_equal(output.numpy(), array), (
            f"{who}: output {i} ({name}) is {output.tolist()}, not {array.tolist()}"
        )
        assert output.numpy().dtype == array.dtype, f"{who}: dtype of output {i} ({name})"


def sharing(tensors):
    """The pairs of tensors that share storage."""
    at = [t.untyped_storage().data_ptr() if t.numel() else None for t in tensors]
    pairs = combinations(range(len(at)), 2)
    return {(i, j) for i, j in pairs if at[i] is not None and at[i] == at[j]}


def check_report(program, reports):
    if not reports:
        assert not program.marked
        return
    (report,) = reports
    assert report.translations_found == program.marked, report
    if program.branches:
        return
    assert sum(value.uses for value in report.values) == program.marked
    refused = len(report.refused)
    nodes = (len(report.values) > refused) + refused
    if program.chained:  # one more for each translation of a translation
        assert nodes <= report.translation_nodes <= len(report.values), report
    else:
        assert report.translation_nodes == nodes, report
    assert report.translations_left <= refused
    if not program.written and not program.activations:
        assert not report.refused, report
