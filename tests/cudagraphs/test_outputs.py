"""What captured code returns is the caller's own, and as tensors it is what the code returned."""

import pytest
import torch

from swa_compile.addresses import Output, independent
from swa_compile.cudagraphs import CapturedGraph
from swa_compile.pieces import Piece

from .recorder import FakeRecorder


class Borrower(FakeRecorder):
    """Gives another tensor over the same memory, as borrowing does on a GPU."""

    def borrow(self, tensor):
        other = torch.empty(0, dtype=tensor.dtype)
        return other.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def captured(run, in_pieces):
    """`run` as one recording, or as one piece of code that returns what the piece does."""
    if not in_pieces:
        return CapturedGraph(run, Borrower())
    piece = Piece(0, run)
    return CapturedGraph(lambda v: piece([*v]), Borrower(), pieces=[piece], mode="piecewise")


@pytest.mark.parametrize("in_pieces", [False, True])
def test_outputs_that_share_memory_share_it_in_the_callers_own(in_pieces):
    """Eager code returns a tensor and its view: a write to one is seen in the other."""

    def run(values):
        y = values[0] * 2
        return [y, y[1:], y.t(), values[0] * 3]

    graph, kept = captured(run, in_pieces), []
    for call in range(5):
        x = torch.full((3, 4), float(call))
        whole, part, turned, other = graph([x])
        assert torch.equal(part, x[1:] * 2) and torch.equal(turned, x.t() * 2)
        part.fill_(-1.0)
        whole[0, 0] = 9.0
        want = x * 2
        want[1:], want[0, 0] = -1.0, 9.0
        kept.append((whole, part, turned, want, other, x * 3))
    assert graph.captures.replays == 4
    for whole, part, turned, want, other, third in kept:  # also past later replays
        assert torch.equal(whole, want) and torch.equal(other, third)
        assert torch.equal(part, want[1:]) and torch.equal(turned, want.t())


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_is_returned_twice_is_one_tensor(in_pieces):
    def run(values):
        y = values[0] * 2
        return [y, None, y]

    graph = captured(run, in_pieces)
    for call in range(5):
        first, nothing, second = graph([torch.full((3,), float(call))])
        assert first is second and nothing is None
        assert first.tolist() == [2.0 * call] * 3


@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_distance_from_the_start_of_the_storage_stays(in_pieces):
    graph = captured(lambda values: [(values[0] * 2)[2:, 1:]], in_pieces)
    for call in range(5):
        x = torch.full((4, 3), float(call))
        (out,) = graph([x])
        assert torch.equal(out, x[2:, 1:] * 2)
        assert (out.storage_offset(), out.stride()) == (7, (3, 1))


@pytest.mark.parametrize("in_pieces", [False, True])
def test_numbers_that_are_conjugated_lazily_are(in_pieces):
    """Inductor returns such tensors; their memory alone is not their value."""

    def run(values):
        y = values[0] * 2
        return [y, y.conj(), y.conj().imag, values[0], values[0].conj()]

    graph = captured(run, in_pieces)
    for call in range(5):
        x = torch.complex(torch.ones(3), torch.full((3,), float(call)))
        same, other, negated, given, turned = graph([x])
        assert torch.equal(same, x * 2) and torch.equal(other, x.conj() * 2)
        assert torch.equal(negated, -2 * x.imag)
        assert given is x and torch.equal(turned, x.conj())


def test_empty_tensors_are_copied_where_they_are():
    outputs = [
        torch.empty(0),
        torch.empty(2, 0, 3, device="meta"),
        torch.empty(0, dtype=torch.int8),
    ]
    for copy, out in zip(independent(outputs), outputs, strict=True):
        assert (copy.shape, copy.dtype, copy.device) == (out.shape, out.dtype, out.device)
    assert independent([torch.ones(4)[4:]])[0].shape == (0,)


def test_one_output_costs_one_allocation_and_one_copy():
    x = torch.ones(4, 4)
    with torch.profiler.profile() as profile:
        independent([x])
    calls = [event.name for event in profile.events()]
    assert sorted(calls) == ["aten::copy_", "aten::empty_strided"]


def test_outputs_at_one_place_of_other_types_keep_the_bytes():
    x = torch.arange(12.0).view(3, 4)
    outputs = [x, x.view(torch.int32)[1], x.view(torch.int64)[:, 1:]]
    copies = independent(outputs)
    assert all(torch.equal(a, b) for a, b in zip(copies, outputs, strict=True))
    copies[0].zero_()
    assert not copies[1].any() and not copies[2].any() and x.any()


def test_a_kept_output_is_that_of_the_input_only_where_it_reads_alike():
    x = torch.complex(torch.ones(2), torch.ones(2))
    assert Output.keep(x.conj(), [x], lambda t: t).place is None
    assert Output.keep(x[1:], [x], lambda t: t).place == 0
