"""Oracles in NumPy, and one way to compile a forward and get its report."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_cache

import swa_compile
from swa_compile.ops import row_program

FULL, ROWS = 96, 24  # ids of the full pool reach far beyond the rows of the SWA pool


@pytest.fixture
def compiled():
    """compiled(fn, *args, engine=..., **options) -> (result, reports): compile and run once."""

    def run(fn, *args, engine="swa_eager", dynamic=None, **options):
        torch._dynamo.reset()
        # Code from a cache has been through the passes before, and leaves no stages in a dump.
        cache = fresh_cache() if "dump_dir" in options else nullcontext()
        with cache, torch.no_grad(), swa_compile.collect() as reports:
            call = torch.compile(
                fn, backend=engine, fullgraph=True, dynamic=dynamic, options=options
            )
            result = call(*args)
        return result, reports

    yield run
    torch._dynamo.reset()


@pytest.fixture
def make_mapping():
    """make_mapping(seed) -> int64 [FULL + 1]: every SWA row but the sink, then -1."""

    def make(seed=0):
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, ROWS, FULL)
        ids[rng.integers(1, FULL, 9)] = 0  # evicted
        return torch.from_numpy(np.append(ids, -1).astype(np.int64))

    return make


@pytest.fixture
def make_caches():
    """make_caches(n) -> n pairs of [ROWS, 2, 4] tensors, every row recognizable."""

    def make(n):
        rng = np.random.default_rng(7)
        return [
            tuple(
                torch.from_numpy(rng.standard_normal((ROWS, 2, 4)).astype(np.float32)) for _ in "kv"
            )
            for _ in range(n)
        ]

    return make


def translate(mapping, loc):
    """NumPy: token translation, one id at a time."""
    mapping, loc = np.asarray(mapping), np.asarray(loc)
    out = np.empty(loc.shape, np.int64)
    for at in np.ndindex(loc.shape):
        out[at] = -1 if loc[at] == -1 else mapping[loc[at]]
    return out


def store(cache, loc, rows):
    """NumPy: the cache after the store, one row at a time; a negative loc goes to row 0."""
    cache = np.asarray(cache).copy()
    for slot, row in zip(np.asarray(loc), np.asarray(rows), strict=True):
        cache[max(int(slot), 0)] = row
    return cache


@pytest.fixture
def oracle():
    """The NumPy reference: oracle.translate, oracle.store, oracle.same_rows."""

    class Oracle:
        pass

    Oracle.translate = staticmethod(translate)
    Oracle.store = staticmethod(store)
    Oracle.same_rows = staticmethod(same_rows)
    return Oracle


def same_rows(got, want):
    """Every row but the sink equals, bit for bit; names the rows that do not."""
    got, want = np.asarray(got)[1:], np.asarray(want)[1:]
    assert got.shape == want.shape
    wrong = [row + 1 for row in range(len(got)) if not np.array_equal(got[row], want[row])]
    assert not wrong, f"rows {wrong} differ"


@pytest.fixture
def fused(monkeypatch):
    """Compiles with fused rows; `fused.programs` lists what ran."""
    module = importlib.import_module("swa_compile.passes.fuse_rows")
    monkeypatch.setattr(module, "worthwhile", lambda node: True)
    programs = []
    rule = row_program.run

    def watched(text, written, inputs, tokens):
        programs.append((text, [t.clone() for t in written], inputs, tokens))
        rule(text, written, inputs, tokens)
        programs[-1] += ([t.clone() for t in written],)

    monkeypatch.setattr(row_program, "run", watched)

    def compile_(forward, **kwargs):
        torch._dynamo.reset()
        return torch.compile(forward, backend="swa_eager", **kwargs)

    compile_.programs = programs
    return compile_
