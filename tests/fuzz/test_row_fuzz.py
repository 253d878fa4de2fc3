"""Random layers with fused rows: what eager code leaves, row by row, by the rule and the kernel.

The programs are the same in every run. For a campaign::

    SWA_FUZZ_PROGRAMS=2000 SWA_FUZZ_SEED=100000 pytest tests/fuzz/test_row_fuzz.py
"""

import importlib
import os
from functools import partial

import pytest
import torch

import swa_compile
from swa_compile.ops import row_program

from .row_layers import ROWS, Draw

CAMPAIGN = int(os.environ.get("SWA_FUZZ_PROGRAMS", "0"))
FIRST = int(os.environ.get("SWA_FUZZ_SEED", "0"))
# A step of each format, and what is lost where it becomes subnormal.
STEP = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2**-7, 2e-3),
    torch.float16: (2**-9, 2e-3),
    torch.float8_e4m3fn: (2**-3, 2**-8),
    torch.float8_e5m2: (2**-2, 2**-15),
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
    for i, (a, b) in enumerate(zip(theirs[-1], mine[-1], strict=True)):
        close(a, b, layer.exact, f"cache {i}")
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        close(a, b, layer.exact, f"output {i}")
    return sum(report.rows_fused for report in reports)


def close(want, got, exact, what):
    """The same bits, or where sums may be taken in another order: a step of the format."""
    assert want.dtype == got.dtype
    a, b = want.float(), got.float()
    if exact:
        same = (a == b) | (a.isnan() & b.isnan())
    else:
        rtol, atol = STEP[want.dtype]
        same = torch.isclose(a, b, rtol=2 * rtol, atol=atol, equal_nan=True)
        steep = same.numel() // 100  # a step of a narrow format in between may grow
        if (~same).sum() <= steep and torch.isclose(a, b, rtol=0.3, atol=0.3).all():
            return
    assert same.all(), f"{what} differs at {(~same).nonzero()[:4].tolist()}: {a[~same][:4]}, {b[~same][:4]}"


def check_kernel(programs):
    from swa_compile.ops import row_triton

    row_triton._kernel.cache_clear()
    for text, before, inputs, tokens, after in programs:
        got = [t.clone() for t in before]
        row_triton.run(text, got, inputs, tokens)
        for i, (a, b) in enumerate(zip(after, got, strict=True)):
            close(a, b, False, f"kernel: tensor {i}")


def run(seed, programs, dynamic, kernel):
    try:
        fused = check_rule(seed, programs, dynamic)
        if kernel:
            check_kernel(programs)
    except Exception as error:
        error.add_note(f"seed {seed}, dynamic={dynamic}, n={draw(seed).n}\n{draw(seed).source}")
        raise
    return fused


def test_layers_leave_what_eager_code_leaves(programs):
    """By the rule; most of them are fused, or this would say nothing."""
    seeds = range(FIRST, FIRST + (CAMPAIGN or 60))
    fused = sum(run(seed, programs, seed % 4 == 1, False) > 0 for seed in seeds)
    assert fused > len(seeds) // 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself there")
def test_kernels_write_what_the_rule_writes(programs, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    for seed in range(FIRST, FIRST + (CAMPAIGN or 30)):
        run(seed, programs, seed % 4 == 1, True)
