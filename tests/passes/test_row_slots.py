"""Ids that no other layer needs are read by the kernel of the store itself."""

import os

import pytest
import torch

import swa_compile
from swa_compile.ops import row_program, store_kv, translate_loc

FULL, ROWS = 40, 24
LOC = torch.tensor([5, -1, 7, 23])


@pytest.fixture
def store(gpu_form, tmp_path):
    """store(forward) -> the text of its fused graph, and its caches."""

    def run(forward, loc=LOC, rows=(ROWS, ROWS), dynamic=False):
        torch._dynamo.reset()
        k, v = (torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in rows)
        x = torch.arange(len(LOC) * 16.0).view(len(LOC), 2, 8)
        loc, options = loc.clone(), {"dump_dir": str(tmp_path)}
        call = torch.compile(forward, backend="swa_eager", options=options)
        if dynamic:
            for tensor in (x, loc):
                torch._dynamo.mark_dynamic(tensor, 0)
        want = [k.clone(), v.clone()]
        with torch.no_grad(), swa_compile.collect() as reports:
            forward(x, loc, *want)
            call(x, loc, k, v)
        assert torch.equal(k[1:], want[0][1:]) and torch.equal(v[1:], want[1][1:])
        assert reports[-1].rows_fused >= 1
        (stage,) = max(tmp_path.rglob("graph-*")).glob("*-fused.py")
        return stage.read_text(), (k, v)

    return run


def one_layer(x, loc, k_cache, v_cache):
    store_kv(k_cache, v_cache, x * 2, x.exp(), loc)


def two_layers(x, loc, k_cache, v_cache):
    store_kv(k_cache, v_cache, x * 2, x.exp(), loc)
    store_kv(k_cache, v_cache, x * 3, x.sin(), loc)


def translated(x, loc, k_cache, v_cache):
    mapping = torch.arange(FULL, device=loc.device) % ROWS
    store_kv(k_cache, v_cache, x * 2, x.exp(), translate_loc(mapping, loc))


def shifted(x, loc, k_cache, v_cache):
    store_kv(k_cache, v_cache, x * 2, x.exp(), loc - 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_prepares_the_ids_of_one_store(store, dtype, dynamic):
    text, caches = store(one_layer, LOC.to(dtype), dynamic=dynamic)
    assert "materialize" not in text and "aten.where" not in text
    x = torch.arange(len(LOC) * 16.0).view(len(LOC), 2, 8)
    for cache, rows in zip(caches, (x * 2, x.exp()), strict=True):
        assert torch.equal(cache[LOC[LOC >= 0]], rows[LOC >= 0])
        assert torch.equal(cache[0], rows[1]), "none goes to the sink row"


@pytest.mark.parametrize("forward", [two_layers, translated, shifted])
def test_what_else_is_computed_ahead_of_the_layers_is_computed_once(store, forward):
    text, _ = store(forward, LOC.clamp_min(1))
    assert text.count("swa.materialize_all.default") == 1


def test_ids_are_checked_for_the_smaller_cache(store):
    """The kernel knows the rows of each cache: it would write K ahead of refusing the id for V."""
    text, _ = store(one_layer, LOC.clamp_max(9), (ROWS, 10))
    assert text.count("swa.materialize_all.default") == 1


@pytest.mark.parametrize(("layers", "prepared"), [(ROWS, 0), (3, 0), (10, 1)])
def test_rows_of_one_layer_of_a_stack_are_the_layers_own(store, layers, prepared):
    """Not as many as there are layers, which here are as many as the smaller cache has rows."""

    def forward(x, loc, k_cache, v_cache):
        store_kv(stacked[2], v_cache, x * 2, x.exp(), loc)

    stacked = torch.zeros(layers, ROWS, 2, 8)
    rows = 10 if prepared else ROWS
    text, _ = store(forward, LOC.clamp_max(9), (1, rows))
    assert text.count("swa.materialize_all.default") == prepared


@pytest.mark.parametrize("bad", [ROWS, -2, -ROWS, 2**40])
def test_an_id_that_no_row_has_is_an_error(store, bad):
    store(one_layer)
    k, v = torch.zeros(2, ROWS, 2, 8)
    loc = torch.tensor([1, 2, bad, 3])
    call = torch.compile(one_layer, backend="swa_eager")
    with torch.no_grad(), pytest.raises(IndexError):
        call(torch.ones(4, 2, 8), loc, k, v)
    assert not k.any() and not v.any()


def test_rows_of_no_fixed_width_stay_where_they_are(gpu_form):
    """Their kernel would have to be made anew for each width."""
    args = torch.randn(4, 2, 8), torch.tensor([1, 2, 9, 3]), *torch.zeros(2, ROWS, 2, 8)
    want = [arg.clone() for arg in args]
    with torch.no_grad(), swa_compile.collect() as reports:
        one_layer(*want)
        torch.compile(one_layer, backend="swa_eager", dynamic=True)(*args)
    assert reports[-1].rows_fused == 0 and reports[-1].stores_lowered == 1
    assert all(map(torch.equal, args, want))


def rows_at(loc, tokens):
    """A program that stores rows at `loc`, its sink row 3, and its operands."""
    step = ["load", 0, [["token"], ["dim", 4]], None]
    output = {
        **{"heads": 1, "dim": 4, "target": 0, "place": [["slot"], ["dim", 4]]},
        **{"slots": 1, "sink": 3, "value": 0, "steps": [step]},
    }
    rows = torch.arange(4.0 * len(loc)).view(-1, 4)
    return row_program.write([output]), [torch.zeros(5, 4)], [rows, torch.tensor(loc)], tokens


def test_a_program_says_where_its_sink_is():
    program = rows_at([-1, 1], 2)
    row_program.run(*program)
    _, (written,), (rows, _), _ = program
    assert torch.equal(written[3], rows[0]) and torch.equal(written[1], rows[1])
    assert not written[[0, 2, 4]].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself there")
def test_the_kernel_knows_the_sink_and_writes_nothing_out_of_range(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    from swa_compile.ops import row_triton

    row_triton._fixed.cache_clear()
    row_triton._kernel.cache_clear()
    program = rows_at([-1, 1, 4], 3)
    row_triton.run(*program)
    _, (written,), (rows, _), _ = program
    assert torch.equal(written[[3, 1, 4]], rows) and not written[[0, 2]].any()
    for bad in (5, -2, -5, 2**40):
        program = rows_at([bad], 1)
        row_triton.run(*program)  # a device is stopped by it; the interpreter goes on
        assert not program[1][0].any()
    row_triton._fixed.cache_clear()
    row_triton._kernel.cache_clear()
