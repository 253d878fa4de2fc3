"""Which modules a `BucketRunner` looks after: all that it is given, whichever way and make."""

import functools
import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from swa_compile.runner import BucketRunner

from .runner_models import Scaled


def scripted():
    return torch.jit.script(torch.nn.Linear(2, 2))


def never_used():
    act = torch.nn.Identity()
    act.spare = torch.nn.LazyLinear(2)
    return act


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("act", [scripted, never_used])
def test_a_module_of_another_make_is_looked_after(recorders, act):
    model = Scaled()
    model.act = act()
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    runner(k=k)
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    held = next(model.act.parameters())
    if not torch.nn.parameter.is_lazy(held):
        held.data = torch.zeros(2, 2)
    for _ in range(3):
        assert torch.equal(runner(k=k), model.act(k @ model.weight))
    assert recorders[0].recordings == 2


def test_the_tensors_behind_a_wrapper_are_looked_after(recorders):
    """It has no address of its own, as weights that are quantized or sharded have none."""
    model = Scaled()
    model.act = torch.nn.Identity()
    model.act.register_buffer("pair", TwoTensor(torch.zeros(2), torch.ones(2)))
    runner = BucketRunner(model, [4])
    runner(k=torch.randn(3, 2))
    model.act.pair = TwoTensor(torch.zeros(2), torch.ones(2))
    for _ in range(3):
        runner(k=torch.randn(3, 2))
    assert recorders[0].recordings == 2
    model.act.pair.b = torch.ones(2)
    for _ in range(3):
        runner(k=torch.randn(3, 2))
    assert recorders[0].recordings == 3


def call_of(model, k):
    return model(k)


WAYS = {
    "method": lambda model: model.forward,
    "partial": functools.partial,
    "partial of a method": lambda model: functools.partial(model.forward),
    "partial that binds it": lambda model: functools.partial(call_of, model),
    "partial that binds it by name": lambda model: functools.partial(call_of, model=model),
    "without gradients": lambda model: torch.no_grad()(model.forward),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled method": lambda model: torch.compile(model.forward, backend="eager"),
    "partial of a compiled method": lambda model: functools.partial(
        torch.compile(model.forward, backend="eager")
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_module_is_looked_after_whichever_way_it_is_called(recorders, way):
    model = Scaled()
    runner = BucketRunner(way(model), [4], dynamic=False)
    k = torch.randn(3, 2)
    runner(k=k)
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    for _ in range(3):
        assert torch.equal(runner(k=k), k @ model.weight)
    assert recorders[0].recordings == 2


def test_all_modules_that_a_partial_binds_are_looked_after(recorders):
    def in_turn(first, second, k):
        return second(first(k))

    first, second = Scaled(), Scaled()
    runner = BucketRunner(functools.partial(in_turn, first, second), [4])
    k = torch.randn(3, 2)
    runner(k=k)
    for recordings, model in enumerate((first, second), 2):
        model.weight = torch.nn.Parameter(torch.ones(2, 2))
        for _ in range(3):
            assert torch.equal(runner(k=k), k @ first.weight @ second.weight)
        assert recorders[0].recordings == recordings


def test_a_parameter_that_is_added_later_is_looked_after(recorders):
    model = Scaled()
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    runner(k=k)
    model.act = torch.nn.Linear(2, 2).requires_grad_(False)
    for _ in range(3):
        runner(k=k)
    model.act.weight = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    for _ in range(3):
        assert torch.equal(runner(k=k), model.act(k @ model.weight))
    assert recorders[0].recordings == 3


def test_recordings_of_a_module_as_it_was_are_dropped(recorders):
    """Their memory would be held for good, and more with every change."""
    model = Scaled()
    runner = BucketRunner(model, [2, 4])
    gone = []
    for step in range(4):
        model.act = torch.nn.Linear(2, 2)
        gone.append(weakref.ref(model.act.weight))
        for n in (1, 4):
            k = torch.randn(n, 2)
            for _ in range(3):
                assert torch.equal(runner(k=k), model.act(k @ model.weight))
        gc.collect()
        assert [ref() is None for ref in gone] == [True] * step + [False]
    assert recorders[0].recordings == 8


def test_a_replay_does_not_walk_through_the_module(recorders, monkeypatch):
    model = Scaled()
    runner = BucketRunner(model, [4])
    runner(k=torch.randn(3, 2))
    walks = []
    named_modules = torch.nn.Module.named_modules
    monkeypatch.setattr(
        torch.nn.Module,
        "named_modules",
        lambda self, *args, **kwargs: (walks.append(self), named_modules(self, *args, **kwargs))[1],
    )
    for _ in range(3):
        runner(k=torch.randn(3, 2))
    assert not walks
    assert list(model.modules()) and walks  # that is how it would be seen
