"""Random layers with fused rows: what eager code leaves, row by row, by the rule and the kernel.

The programs are the same in every run. For a campaign::

    SWA_FUZZ_PROGRAMS=2000 SWA_FUZZ_SEED=100000 pytest tests/fuzz/test_row_fuzz.py
"""

import importlib
import os

import pytest
import torch

import swa_compile
from swa_compile.ops import row_program

from .row_layers import Draw

CAMPAIGN = int(os.environ.get("SWA_FUZZ_PROGRAMS", "0"))
FIRST = int(os.environ.get("SWA_FUZZ_SEED", "0"))
# How far apart two numbers of each format are, relative to them.
STEP = {
    torch.float32: 2**-18,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.float8_e4m3fn: 2**-3,
    torch.float8_e5m2: 2**-2,
}


@pytest.fixture
def programs(monkeypatch):
    """Fuses rows on the CPU; lists each call with what it left."""
    fuse_rows = importlib.import_module("swa_compile.passes.fuse_rows")
    monkeypatch.setattr(fuse_rows, "worthwhile", lambda node: True)
    found = []
    rule = row_program.run

    def watched(text, written, inputs, tokens):
        before = [t.clone() for t in written]
        kept = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
        kept = [t if 0 in t.stride() else k.copy_(t) for k, t in zip(kept, inputs, strict=True)]
        rule(text, written, inputs, tokens)
        found.append((text, before, kept, tokens, [t.clone() for t in written]))

    monkeypatch.setattr(row_program, "run", watched)
    return found


def draw(seed):
    return Draw(seed, (1, 2, 7)[seed % 3]).whole()


def check_rule(seed, programs, dynamic):
    layer = draw(seed)
    forward, mine, theirs = layer.function(), layer.arguments(), layer.arguments()
    torch._dynamo.reset()
    programs.clear()
    with torch.no_grad(), swa_compile.collect() as reports:
        want = forward(*theirs)
        got = torch.compile(forward, backend="swa_eager", fullgraph=True, dynamic=dynamic)(*mine)
    step = 0 if layer.exact else coarsest(layer)
    for i, (a, b) in enumerate(zip(theirs[-1], mine[-1], strict=True)):
        close(a, b, step, f"cache {i}")
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        close(a, b, step, f"output {i}")
    return sum(report.rows_fused for report in reports)


def close(want, got, step, what):
    """The same bits, or up to a few steps of the coarsest format on the way.

    Relative to the row: what is left of a difference of large numbers is no more exact than they.
    """
    assert want.dtype == got.dtype
    a, b = want.float(), got.float()
    same = (a == b) | (a.isnan() & b.isnan())
    if step:
        largest = a.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
        same |= (a - b).abs() <= 4 * max(step, STEP[want.dtype]) * largest
    at = (~same).nonzero()[:4].tolist()
    assert same.all(), f"{what} differs at {at}: {a[~same][:4]}, {b[~same][:4]}"


def coarsest(layer):
    kinds = {layer.dtype, *(d for d in STEP if str(d) in layer.source)}
    return max(STEP[kind] for kind in kinds)


def check_kernel(programs, layer):
    from swa_compile.ops import row_triton

    row_triton._fixed.cache_clear()
    row_triton._kernel.cache_clear()
    for text, before, inputs, tokens, after in programs:
        # The interpreter loses the carry when it rounds to a power of two; tests/gpu has float8.
        if "float8" in text or any("float8" in str(t.dtype) for t in before):
            continue
        got = [t.clone() for t in before]
        row_triton.run(text, got, inputs, tokens)
        for i, (a, b) in enumerate(zip(after, got, strict=True)):
            close(a, b, coarsest(layer), f"kernel: tensor {i}")


def run(seed, programs, dynamic, kernel):
    try:
        fused = check_rule(seed, programs, dynamic)
        if kernel:
            check_kernel(programs, draw(seed))
    except Exception as error:
        error.add_note(f"seed {seed}, dynamic={dynamic}, n={draw(seed).n}\n{draw(seed).source}")
        raise
    return fused


def test_layers_leave_what_eager_code_leaves(programs):
    """By the rule; most of them are fused, or this would say nothing."""
    seeds = range(FIRST, FIRST + (CAMPAIGN or 24))
    fused = sum(run(seed, programs, seed % 4 == 1, False) > 0 for seed in seeds)
    assert fused > len(seeds) // 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself there")
def test_kernels_write_what_the_rule_writes(programs, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    for seed in range(FIRST, FIRST + (CAMPAIGN or 12)):
        run(seed, programs, seed % 4 == 1, True)
