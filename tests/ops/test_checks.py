"""The operators that the passes put into graphs: `check_ids` and `materialize`."""

import pytest
import torch

import swa_compile.ops  # noqa: F401  registers torch.ops.swa

check_ids = torch.ops.swa.check_ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [torch.arange(6).view(2, 3).t(), torch.arange(0), torch.tensor(3)])
def test_ids_in_range_come_back_as_a_fresh_contiguous_copy(ids, dtype):
    ids = ids.to(dtype)
    got = check_ids(ids, -1, 6, "x")
    assert torch.equal(got, ids)
    assert got.dtype is dtype
    assert got.is_contiguous()
    assert got.data_ptr() != ids.data_ptr() or not ids.numel()
    torch.library.opcheck(check_ids.default, (ids, -1, 6, "x"))


@pytest.mark.parametrize(("bad", "place"), [([5, 7, 9], 1), ([0, -2], 1), ([6], 0)])
def test_first_id_outside_is_named_with_its_position(bad, place):
    with pytest.raises(ValueError, match=rf"^here holds {bad[place]} at position {place}; .*6\)$"):
        check_ids(torch.tensor(bad), -1, 6, "here")


def test_0d_id_outside_has_no_position():
    with pytest.raises(ValueError, match=r"^here holds 9; ids must lie in \[-1, 6\)$"):
        check_ids(torch.tensor(9), -1, 6, "here")


def test_wrong_dtype_is_refused():
    with pytest.raises(TypeError, match=r"^here must be int32 or int64, got float32$"):
        check_ids(torch.zeros(2), -1, 6, "here")


def test_compiled_check_raises_for_the_ids_of_each_call():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids, table: table[check_ids(ids, 0, table.shape[0], "ids")],
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    table = torch.arange(10)
    assert compiled(torch.tensor([3, 9]), table).tolist() == [3, 9]
    with pytest.raises(
        ValueError, match=r"^ids holds 10 at position 1; ids must lie in \[0, 10\)$"
    ):
        compiled(torch.tensor([3, 10]), table)
    assert compiled(torch.tensor([3, 10, 1]), torch.arange(11)).tolist() == [3, 10, 1]


@pytest.mark.parametrize("value", [torch.arange(6).view(2, 3).t(), torch.tensor(1), torch.ones(0)])
def test_materialize_copies_and_keeps_the_strides(value):
    got = torch.ops.swa.materialize(value)
    assert torch.equal(got, value)
    assert got.stride() == value.stride()
    assert got.data_ptr() != value.data_ptr() or not value.numel()
    torch.library.opcheck(torch.ops.swa.materialize.default, (value,))
