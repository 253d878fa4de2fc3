"""Translations: their values against loops in NumPy, their layout, their errors."""

import itertools

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from swa_compile import ops

PAGE = 4
SWA = 12  # slots of the SWA pool; full ids go beyond it
FULL = 40


def mapping() -> torch.Tensor:
    """A token mapping in which every third token is evicted (0), -1 last."""
    rng = np.random.default_rng(0)
    values = rng.integers(1, SWA, FULL + PAGE + 1)
    values[::3] = 0
    values[-1] = -1
    return torch.from_numpy(values)


def page_mapping() -> torch.Tensor:
    return torch.tensor([0, 2, -1, 5, 1, -1, 3, 4])


def token_oracle(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.array([-1 if i == -1 else table[i] for i in ids.ravel()], np.int64).reshape(ids.shape)


def page_oracle(table: np.ndarray, ids: np.ndarray, page: int) -> np.ndarray:
    found = [-1 if p == -1 else table[p * page] // page for p in ids.ravel()]
    return np.array(found, np.int64).reshape(ids.shape)


def paged_oracle(table: np.ndarray, ids: np.ndarray, page: int) -> np.ndarray:
    found = []
    for i in ids.ravel().tolist():
        known = i >= 0 and i // page < len(table) and table[i // page] >= 0
        found.append(table[i // page] * page + i % page if known else 0)
    return np.array(found, np.int64).reshape(ids.shape)


# operator, its oracle, the mapping, the page size, ids to draw from
KINDS = {
    "translate_loc": (token_oracle, mapping(), (), (-1, FULL + PAGE + 1)),
    "translate_page_table": (page_oracle, mapping(), (PAGE,), (-1, FULL // PAGE + 2)),
    "translate_paged_loc": (paged_oracle, page_mapping(), (PAGE,), (-1, 8 * PAGE + 9)),
}

LAYOUTS = {
    "contiguous": lambda ids: ids(24),
    "matrix": lambda ids: ids(4, 6),
    "permuted": lambda ids: ids(4, 6).t(),
    "permuted 3-D": lambda ids: ids(2, 3, 4).permute(2, 0, 1),
    "sliced": lambda ids: ids(48)[3:40:3],
    "expanded": lambda ids: ids(5, 1).expand(5, 3),
    "empty": lambda ids: ids(0),
    "one": lambda ids: ids(1),
    "0-d": lambda ids: ids(),
}


def draw(kind: str, layout: str, dtype: torch.dtype) -> torch.Tensor:
    low, high = KINDS[kind][3]
    generator = torch.Generator().manual_seed(1)
    return LAYOUTS[layout](
        lambda *shape: torch.randint(low, high, shape, generator=generator, dtype=dtype)
    )


every_kind = pytest.mark.parametrize("kind", KINDS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


@every_kind
@every_layout
@both_dtypes
def test_values_are_the_oracles(kind, layout, dtype):
    oracle, table, size, _ = KINDS[kind]
    ids = draw(kind, layout, dtype)
    before = ids.clone()
    got = getattr(ops, kind)(table, ids, *size)
    np.testing.assert_array_equal(got.numpy(), oracle(table.numpy(), ids.numpy(), *size))
    assert torch.equal(ids, before)


@every_kind
@every_layout
@both_dtypes
def test_result_is_fresh_contiguous_int64_and_fake_agrees(kind, layout, dtype):
    _, table, size, _ = KINDS[kind]
    ids = draw(kind, layout, dtype)
    op = getattr(torch.ops.swa, kind)
    real = op(table, ids, *size)
    assert real.dtype is torch.int64
    assert real.shape == ids.shape
    assert real.is_contiguous()
    assert real.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr() or not ids.numel()
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(table), mode.from_tensor(ids), *size)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@every_kind
@pytest.mark.parametrize("layout", ["contiguous", "permuted", "sliced", "empty", "one", "0-d"])
@both_dtypes
def test_opcheck(kind, layout, dtype):
    _, table, size, _ = KINDS[kind]
    ids = draw(kind, layout, dtype)
    torch.library.opcheck(getattr(torch.ops.swa, kind).default, (table, ids, *size))


@every_kind
def test_strided_mapping_is_read_through_its_strides(kind):
    oracle, table, size, _ = KINDS[kind]
    wide = torch.stack([table, torch.full_like(table, 7)], dim=1)
    ids = draw(kind, "contiguous", torch.int64)
    got = getattr(ops, kind)(wide[:, 0], ids, *size)
    np.testing.assert_array_equal(got.numpy(), oracle(table.numpy(), ids.numpy(), *size))


@every_kind
def test_identity_mapping_gives_no_alias(kind):
    size = KINDS[kind][2]
    identity = torch.cat([torch.arange(16), torch.tensor([-1])])
    ids = torch.arange(4)
    got = getattr(ops, kind)(identity, ids, *size)
    got.fill_(99)
    assert ids.tolist() == [0, 1, 2, 3]


@every_kind
def test_translation_commutes_with_views(kind):
    _, table, size, _ = KINDS[kind]
    ids = draw(kind, "matrix", torch.int64)
    whole = getattr(ops, kind)(table, ids, *size)
    for view in (lambda t: t[1:3, ::2], lambda t: t.t(), lambda t: t.reshape(-1)[5:17:4]):
        assert torch.equal(getattr(ops, kind)(table, view(ids), *size), view(whole))


def test_none_in_the_middle_of_a_mapping_floors_to_none():
    table = torch.tensor([0, 0, 0, 0, -1, 0, 0, 0, 9, -1])
    assert ops.translate_page_table(table, torch.tensor([0, 1, 2]), 4).tolist() == [0, -1, 2]


@every_kind
def test_mapping_without_ids_takes_none_alone(kind):
    size = KINDS[kind][2]
    none = 0 if kind == "translate_paged_loc" else -1
    empty = torch.empty(0, dtype=torch.int64)
    got = getattr(ops, kind)(empty, torch.tensor([-1, -1]), *size)
    assert got.tolist() == [none, none]


OUT_OF_RANGE = [
    ("translate_loc", -2, r"holds -2 at position 1; ids must lie in \[-1, 45\)"),
    ("translate_loc", FULL + PAGE + 1, r"holds 45 at position 1; ids must lie in \[-1, 45\)"),
    ("translate_page_table", -2, r"holds -2 at position 1; ids must lie in \[-1, 12\)"),
    ("translate_page_table", 12, r"holds 12 at position 1; ids must lie in \[-1, 12\)"),
    ("translate_paged_loc", -2, r"holds -2 at position 1; ids must lie in \[-1, \.\.\.\)"),
]


@pytest.mark.parametrize(("kind", "bad", "message"), OUT_OF_RANGE)
def test_id_out_of_range_is_an_error_on_the_cpu(kind, bad, message):
    _, table, size, _ = KINDS[kind]
    name = "page_table" if "page_table" in kind else "loc"
    with pytest.raises(ValueError, match=f"^swa::{kind}: argument '{name}' {message}$"):
        getattr(ops, kind)(table, torch.tensor([0, bad, -9]), *size)


def test_position_of_a_bad_id_in_a_matrix_has_all_its_coordinates():
    with pytest.raises(ValueError, match=r"holds 99 at position \(1, 0\)"):
        ops.translate_loc(mapping(), torch.tensor([[0, 1], [99, 98]]))


def wrong_inputs(kind):
    _, table, size, _ = KINDS[kind]
    ids = torch.tensor([1])
    name = "page_table" if "page_table" in kind else "loc"
    table_name = "page_mapping" if kind == "translate_paged_loc" else "mapping"
    yield TypeError, f"'{name}' must be int32 or int64, got float32", (table, ids.float(), *size)
    yield TypeError, f"'{table_name}' must be int64, got int32", (table.int(), ids, *size)
    yield (
        ValueError,
        rf"'{table_name}' must be 1-D \[ids\], got shape \[2, 2\]",
        (
            torch.zeros(2, 2, dtype=torch.int64),
            ids,
            *size,
        ),
    )
    yield (
        ValueError,
        f"'{name}' must be on the device of '{table_name}', cpu, got meta",
        (
            table,
            ids.to("meta"),
            *size,
        ),
    )
    if size:
        yield ValueError, "'page_size' must be at least 1, got 0", (table, ids, 0)


WRONG = [(kind, *case) for kind in KINDS for case in wrong_inputs(kind)]


@pytest.mark.parametrize(("kind", "error", "message", "args"), WRONG)
def test_wrong_input_is_the_same_error_eager_and_fake(kind, error, message, args):
    op = getattr(torch.ops.swa, kind)
    pattern = f"^swa::{kind}: argument {message}$"
    if not any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
        # Two devices of which one has no data never get to a kernel.
        with pytest.raises(error, match=pattern):
            op(*args)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(error, match=pattern),
    ):
        op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))


@every_kind
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_agrees_with_eager(kind, dynamic):
    _, table, size, _ = KINDS[kind]
    op = getattr(ops, kind)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t, i: op(t, i, *size), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for layout, dtype in itertools.product(["contiguous", "permuted", "one"], [torch.int32]):
        ids = draw(kind, layout, dtype)
        got, want = compiled(table, ids), op(table, ids, *size)
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


@every_kind
def test_number_of_ids_stays_dynamic(kind):
    _, table, size, (low, high) = KINDS[kind]
    op = getattr(ops, kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, i: op(t, i, *size), backend=counter, fullgraph=True)
    for count in (0, 1, 2, 5, 9):
        ids = torch.randint(low, high, (count,))
        torch._dynamo.decorators.mark_unbacked(ids, 0)
        assert torch.equal(compiled(table, ids), op(table, ids, *size))
    assert counter.frame_count == 1


@every_kind
def test_symbolic_trace_keeps_page_size_and_ids_symbolic(kind):
    _, table, size, _ = KINDS[kind]
    ids = draw(kind, "matrix", torch.int32)
    op = getattr(torch.ops.swa, kind)
    traced = make_fx(lambda t, i: op(t, i, *size), tracing_mode="symbolic")(table, ids)
    other = ids[:, :3]
    assert torch.equal(traced(table[:], other), op(table, other, *size))


def test_many_calls_each_kind_by_name():
    tables = [table for _, table, _, _ in KINDS.values()]
    ids = [draw(kind, "matrix", torch.int32) for kind in KINDS]
    sizes = [size[0] if size else 0 for _, _, size, _ in KINDS.values()]
    names = [f"swa::{kind}" for kind in KINDS]
    got = torch.ops.swa.translate_many(tables, ids, names, sizes)
    for result, kind, table, i, size in zip(got, KINDS, tables, ids, sizes, strict=True):
        want = getattr(ops, kind)(table, i, *([size] if size else []))
        assert torch.equal(result, want)
    torch.library.opcheck(torch.ops.swa.translate_many.default, (tables, ids, names, sizes))


def test_many_refuses_unmarked_operators_and_uneven_lists():
    args = ([mapping()], [torch.tensor([0])])
    with pytest.raises(ValueError, match=r"aten::add\.Tensor is not marked as a translation"):
        torch.ops.swa.translate_many(*args, ["aten::add.Tensor"], [0])
    with pytest.raises(ValueError, match=r"lists of one length wanted, got \[1, 1, 1, 2\]"):
        torch.ops.swa.translate_many(*args, ["swa::translate_loc"], [0, 0])
