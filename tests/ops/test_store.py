"""Stores: whole caches, row by row, against loops in NumPy; nothing is written after an error."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from swa_compile import ops

ROWS = 11
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def k_and_v(count: int, k_row=(2, 3), v_row=(2, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    k = torch.randn(count, *k_row, generator=generator)
    return k, torch.randn(count, *v_row, generator=generator)


def caches(dtype=torch.float32, k_row=(2, 3), v_row=(2, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(ROWS, *row, generator=generator).to(dtype) for row in (k_row, v_row))


def after_store(cache: torch.Tensor, rows: torch.Tensor, loc: list[int]) -> np.ndarray:
    """The oracle: the cache's rows, one write at a time. Row 0, the sink, is left unspecified."""
    expected = cache.float().numpy().copy()
    for i, slot in enumerate(loc):
        if slot > 0:
            expected[slot] = rows[i].to(cache.dtype).float().numpy()
    return expected


def assert_rows(cache: torch.Tensor, expected: np.ndarray) -> None:
    assert len(cache) == len(expected)
    for row in range(1, len(expected)):
        np.testing.assert_array_equal(cache[row].float().numpy(), expected[row], f"row {row}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("loc", [[3, 7, 1, 9], [], [10], [0, 0, 2], [-1, 5, -1]])
def test_every_row_is_the_oracles(dtype, index, loc):
    k, v = k_and_v(len(loc))
    k_cache, v_cache = caches(dtype)
    want_k, want_v = after_store(k_cache, k, loc), after_store(v_cache, v, loc)
    assert ops.store_kv(k_cache, v_cache, k, v, torch.tensor(loc, dtype=index)) is None
    assert_rows(k_cache, want_k)
    assert_rows(v_cache, want_v)


def test_none_goes_to_the_sink_and_to_no_other_row():
    k, v = k_and_v(2)
    k_cache, v_cache = caches()
    before = k_cache.clone()
    ops.store_kv(k_cache, v_cache, k, v, torch.tensor([-1, -1]))
    assert torch.equal(k_cache[1:], before[1:])
    assert any(torch.equal(k_cache[0], row) for row in k)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 2)])
def test_caches_of_any_rank(shape):
    k, v = k_and_v(3, shape, shape)
    k_cache, v_cache = caches(torch.float32, shape, shape)
    want = after_store(k_cache, k, [4, 2, 8])
    ops.store_kv(k_cache, v_cache, k, v, torch.tensor([4, 2, 8]))
    assert_rows(k_cache, want)


def strided_pairs():
    """Two caches [ROWS, 2, 3] over one allocation, with what else the allocation holds."""
    stacked = torch.zeros(4, ROWS, 2, 3)
    yield "layers of a stack", stacked, stacked[1], stacked[3]
    halves = torch.zeros(ROWS, 2, 2, 3)
    yield "halves of each row", halves, halves[:, 0], halves[:, 1]
    one_row = torch.zeros(ROWS, 12)
    pair = one_row[:, :6].unflatten(1, (2, 3)), one_row[:, 6:].unflatten(1, (2, 3))
    yield "columns of a row", one_row, *pair
    turned = torch.zeros(3, 2, 2 * ROWS)
    whole = turned.permute(2, 1, 0)
    yield "permuted", turned, whole[:ROWS], whole[ROWS:]
    stepped = torch.zeros(2 * ROWS, 2, 3)
    yield "every second row", stepped, stepped[::2], stepped[1::2]


@pytest.mark.parametrize("case", list(strided_pairs()), ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_strides_of_caches_are_respected(case, dtype):
    _, base, k_view, v_view = case
    base = base.to(dtype)
    k_cache, v_cache = (
        base.as_strided(view.shape, view.stride(), view.storage_offset())
        for view in (k_view, v_view)
    )
    k, v = k_and_v(3, (2, 3), (2, 3))
    k, v = k.to(dtype), v.to(dtype)
    want_k, want_v = after_store(k_cache, k, [6, 10, 2]), after_store(v_cache, v, [6, 10, 2])
    ops.store_kv(k_cache, v_cache, k, v, torch.tensor([6, 10, 2]))
    assert_rows(k_cache, want_k)
    assert_rows(v_cache, want_v)
    assert int((base.float() != 0).sum()) == 3 * 6 * 2


def test_k_and_v_may_be_views_of_one_projection():
    qkv = torch.randn(3, 18)
    k, v = (part.unflatten(1, (2, 3)) for part in qkv[:, 6:].chunk(2, dim=1))
    k_cache, v_cache = caches(v_row=(2, 3))
    want_k, want_v = after_store(k_cache, k, [1, 2, 3]), after_store(v_cache, v, [1, 2, 3])
    ops.store_kv(k_cache, v_cache, k, v, torch.arange(8)[1:7:2].clone() // 2 + 1)
    assert_rows(k_cache, want_k)
    assert_rows(v_cache, want_v)


def test_rows_may_be_copied_within_a_cache():
    k_cache, v_cache = caches()
    want_k = after_store(k_cache, k_cache[1:4].clone(), [2, 3, 4])
    ops.store_kv(k_cache, v_cache, k_cache[1:4], v_cache[1:4], torch.tensor([2, 3, 4]))
    assert_rows(k_cache, want_k)


def test_two_stores_keep_their_order():
    k_cache, v_cache = caches()
    for value in (1.0, 2.0):
        k, v = torch.full((1, 2, 3), value), torch.full((1, 2, 5), value)
        ops.store_kv(k_cache, v_cache, k, v, torch.tensor([4]))
    assert k_cache[4].unique().tolist() == [2.0]


def test_a_store_is_not_recorded_for_autograd():
    k, v = (t.requires_grad_() for t in k_and_v(1))
    k_cache, v_cache = caches()
    ops.store_kv(k_cache, v_cache, k, v, torch.tensor([4]))
    assert not k_cache.requires_grad
    assert torch.equal(k_cache[4], k[0])


# Scales


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("form", ["floats", "tensors", "one of each", "k alone", "none"])
def test_float8_rows_are_divided_by_the_scale_and_saturate(dtype, form):
    k, v = k_and_v(3)
    k[0, 0] = torch.tensor([1e6, -1e6, torch.nan])
    k_cache, v_cache = (cache.to(dtype) for cache in caches())
    scales = {
        "floats": (0.5, 2.0),
        "tensors": (torch.tensor(0.5), torch.tensor(2.0)),
        "one of each": (0.5, torch.tensor(2.0)),
        "k alone": (0.5, None),
        "none": (None, None),
    }[form]
    ops.store_kv(k_cache, v_cache, k, v, torch.tensor([1, 2, 3]), *scales)
    limit = torch.finfo(dtype).max
    for cache, rows, scale in ((k_cache, k, scales[0]), (v_cache, v, scales[1])):
        divided = np.clip(rows.numpy() / np.float32(1.0 if scale is None else scale), -limit, limit)
        want = torch.from_numpy(divided).to(dtype).float().numpy()
        np.testing.assert_array_equal(cache[1:4].float().numpy(), want)
    assert k_cache[1, 0].float().tolist()[:2] == [limit, -limit]


def test_operator_itself_takes_floats_and_tensors():
    k, v = k_and_v(1)
    for scale in (0.5, torch.tensor(0.5)):
        k_cache, v_cache = (cache.to(FLOAT8[0]) for cache in caches())
        torch.ops.swa.store_kv(k_cache, v_cache, k, v, torch.tensor([2]), k_scale=scale)
        assert torch.equal(k_cache[2].float(), (k[0] / 0.5).to(FLOAT8[0]).float())


def test_latent_takes_a_scale_of_either_kind():
    latent = torch.randn(2, 1, 6)
    for scale in (0.5, torch.tensor(0.5)):
        cache = torch.zeros(ROWS, 1, 6).to(FLOAT8[0])
        ops.store_latent(cache, latent, torch.tensor([2, -1]), scale)
        assert torch.equal(cache[2].float(), (latent[0] / 0.5).to(FLOAT8[0]).float())


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_latent_rows_are_the_oracles(shape):
    cache, latent = torch.randn(ROWS, *shape).bfloat16(), torch.randn(3, *shape)
    want = after_store(cache, latent, [5, -1, 10])
    ops.store_latent(cache, latent, torch.tensor([5, -1, 10]))
    assert_rows(cache, want)


# Errors


def inputs(**changes):
    k_cache, v_cache = caches()
    k, v = k_and_v(2)
    names = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "loc": torch.tensor([1, 2])}
    return {**names, "k_scale": None, "v_scale": None, **changes}


FEW = "must have one id per row of"
LIKE = "must have rows like those of"
SHAPES = r"got shape \[1, 2\]"
WRONG = [
    (ValueError, f"'loc' {FEW} 'k': got 3 ids for 2 rows", {"loc": torch.tensor([1, 2, 3])}),
    (ValueError, f"'loc' {FEW} 'v': got 2 ids for 3 rows", {"v": torch.zeros(3, 2, 5)}),
    (ValueError, rf"'loc' must be 1-D \[N\], {SHAPES}", {"loc": torch.tensor([[1, 2]])}),
    (TypeError, "'loc' must be int32 or int64, got float32", {"loc": torch.zeros(2)}),
    (TypeError, "'k' must be floating-point, got int64", {"k": torch.ones(2, 2, 3).long()}),
    (
        TypeError,
        "'v_cache' must be floating-point, got uint8",
        {"v_cache": torch.zeros(ROWS, 2, 5, dtype=torch.uint8)},
    ),
    (
        ValueError,
        rf"'k' {LIKE} 'k_cache': got \[2, 2, 4\] for a cache \[11, 2, 3\]",
        {"k": torch.zeros(2, 2, 4)},
    ),
    (
        ValueError,
        rf"'v' {LIKE} 'v_cache': got \[2, 10\] for a cache \[11, 2, 5\]",
        {"v": torch.zeros(2, 10)},
    ),
    (ValueError, "'k' must have rows, got a 0-d tensor", {"k": torch.tensor(1.0)}),
    (
        ValueError,
        "'k_scale' needs a float8 cache, got 'k_cache' of float32",
        {"k_scale": torch.tensor(1.0)},
    ),
    (ValueError, "'v_scale' needs a float8 cache, got 'v_cache' of float32", {"v_scale": 2.0}),
    (
        TypeError,
        "'v_scale' must be float32, got float64",
        {"v_cache": caches(FLOAT8[0])[1], "v_scale": torch.tensor(1.0, dtype=torch.float64)},
    ),
    (
        ValueError,
        r"'v_scale' must be 0-D \(a scalar\), got shape \[1\]",
        {"v_cache": caches(FLOAT8[0])[1], "v_scale": torch.ones(1)},
    ),
    (
        ValueError,
        "'loc' must be on the device of 'k_cache', cpu, got meta",
        {"loc": torch.zeros(2, dtype=torch.int64, device="meta")},
    ),
]


@pytest.mark.parametrize(("error", "message", "changes"), WRONG)
def test_wrong_input_is_the_same_error_eager_and_fake_and_writes_nothing(error, message, changes):
    args = inputs(**changes)
    before = [args[name].clone() for name in ("k_cache", "v_cache")]
    pattern = f"^swa::store_kv: argument {message}$"
    if not any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args.values()):
        with pytest.raises(error, match=pattern):
            ops.store_kv(**args)
        for name, want in zip(("k_cache", "v_cache"), before, strict=True):
            assert torch.equal(args[name].float(), want.float())
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(a) if torch.is_tensor(a) else a for n, a in args.items()}
        with pytest.raises(error, match=pattern):
            ops.store_kv(**fake)


@pytest.mark.parametrize("bad", [-2, ROWS, 2**40])
@pytest.mark.parametrize("compiled", [False, True])
def test_id_out_of_range_writes_nothing(bad, compiled):
    store = ops.store_kv
    if compiled:
        torch._dynamo.reset()
        store = torch.compile(ops.store_kv, backend="aot_eager", fullgraph=True)
    args = inputs(loc=torch.tensor([3, bad]))
    before = [args[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(ValueError, match=rf"'loc' holds {bad} at position 1; .* \[-1, 11\)"):
        store(**args)
    for name, want in zip(("k_cache", "v_cache"), before, strict=True):
        assert torch.equal(args[name], want)


def test_id_must_lie_in_both_caches():
    args = inputs(v_cache=torch.zeros(3, 2, 5), loc=torch.tensor([1, 3]))
    before = args["k_cache"].clone()
    with pytest.raises(ValueError, match=r"holds 3 at position 1; ids must lie in \[-1, 3\)"):
        ops.store_kv(**args)
    assert torch.equal(args["k_cache"], before)


def test_latent_error_names_its_own_arguments():
    with pytest.raises(ValueError, match=r"^swa::store_latent: argument 'latent' must have rows"):
        ops.store_latent(torch.zeros(4, 6), torch.zeros(2, 5), torch.tensor([0, 1]))


# Tracing


def opcheck_inputs():
    for loc in ([3, 1, -1], [], [2]):
        for index in (torch.int32, torch.int64):
            k, v = k_and_v(len(loc))
            yield (*caches(), k, v, torch.tensor(loc, dtype=index))
    k, v = k_and_v(3)
    stack = torch.zeros(3, ROWS, 2, 3)
    permuted, stepped = torch.zeros(3, 2, ROWS).permute(2, 1, 0), torch.zeros(2 * ROWS, 2, 3)[::2]
    turned = torch.randn(3, 2, 3).permute(2, 1, 0)
    loc = torch.arange(9)[1:7:2]
    yield stack[1], stack[2], k, k + 1, loc
    yield permuted, stepped, turned, k, loc


@pytest.mark.parametrize("args", list(opcheck_inputs()))
def test_opcheck(args):
    torch.library.opcheck(torch.ops.swa.store_kv.default, args)


# torch's own schema check multiplies what it compares, which float8 tensors cannot be.
FLOAT8_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("overload", ["default", "scalar"])
def test_opcheck_with_scales(overload):
    number = float if overload == "scalar" else torch.tensor
    loc = torch.tensor([1, 2, -1])
    args = (*caches(FLOAT8[0]), *k_and_v(3), loc, number(0.5), number(2.0))
    op = getattr(torch.ops.swa.store_kv, overload)
    torch.library.opcheck(op, args, test_utils=FLOAT8_TESTS)
    args = (torch.zeros(ROWS, 6).to(FLOAT8[0]), torch.randn(3, 6), loc, number(0.5))
    op = getattr(torch.ops.swa.store_latent, overload)
    torch.library.opcheck(op, args, test_utils=FLOAT8_TESTS)


def test_opcheck_of_latent():
    args = (torch.zeros(ROWS, 1, 6), torch.randn(3, 1, 6), torch.tensor([1, 2, -1]))
    torch.library.opcheck(torch.ops.swa.store_latent.default, args)
    torch.library.opcheck(torch.ops.swa.store_latent.scalar, args)
    torch.library.opcheck(torch.ops.swa.store_kv.scalar, (*caches(), *k_and_v(3), args[2]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scales", [(), (0.5, 2.0), "tensors", (0.5, torch.tensor(2.0))])
def test_compiled_agrees_with_eager_on_every_row(dynamic, scales):
    dtype = FLOAT8[0] if scales else torch.float32
    if scales == "tensors":
        scales = torch.tensor(0.5), torch.tensor(2.0)
    torch._dynamo.reset()
    compiled = torch.compile(ops.store_kv, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for loc in ([3, 7, -1], [1]):
        k, v = k_and_v(len(loc))
        eager, other = caches(dtype), caches(dtype)
        ops.store_kv(*eager, k, v, torch.tensor(loc), *scales)
        compiled(*other, k, v, torch.tensor(loc), *scales)
        for want, got in zip(eager, other, strict=True):
            assert_rows(got, want.float().numpy())


def graphs_of(function, *args):
    """The functional graphs that AOTAutograd makes of `function`, which runs once."""
    from functorch.compile import make_boxed_func

    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module)

    torch._dynamo.reset()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs


@pytest.mark.parametrize(("scale", "overload"), [(None, "default"), (0.5, "scalar")])
def test_overload_that_a_graph_holds(scale, overload):
    k, v = k_and_v(2)
    args = (*caches(FLOAT8[0]), k, v, torch.tensor([1, 2]))
    tensors = torch.tensor(0.5), torch.tensor(0.5)
    for scales, name in ((() if scale is None else (scale,), overload), (tensors, "default")):
        (graph,) = graphs_of(lambda *a, s=scales: torch.ops.swa.store_kv(*a, *s), *args)
        stores = [node.args[0] for node in graph.nodes if "auto_functionalized" in str(node.target)]
        assert stores == [getattr(torch.ops.swa.store_kv, name)]


def test_number_of_rows_stays_dynamic():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(ops.store_kv, backend=counter, fullgraph=True)
    for loc in ([4], [], [3, 7, -1, 5]):
        k, v = k_and_v(len(loc))
        index = torch.tensor(loc, dtype=torch.int64)
        for tensor in (k, v, index):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        k_cache, v_cache = caches()
        want = after_store(k_cache, k, loc)
        compiled(k_cache, v_cache, k, v, index)
        assert_rows(k_cache, want)
    assert counter.frame_count == 1


def test_length_mismatch_is_seen_while_compiling():
    torch._dynamo.reset()
    compiled = torch.compile(ops.store_kv, backend="aot_eager", fullgraph=True, dynamic=True)
    args = inputs(loc=torch.tensor([1, 2, 3]))
    before = args["k_cache"].clone()
    with pytest.raises(Exception, match=r"must have one id per row of 'k'"):
        compiled(**args)
    assert torch.equal(args["k_cache"], before)
