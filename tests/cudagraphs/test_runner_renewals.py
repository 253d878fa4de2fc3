"""What renews the recordings of a `BucketRunner`: other tensors, submodules, names and hooks."""

import pytest
import torch

from swa_compile.runner import BucketRunner

from .runner_models import ROWS, Scaled, Store, call, make_mapping


@pytest.mark.parametrize("what", ["mapping", "cache", "weight"])
def test_a_replaced_tensor_renews_the_recording(recorders, what):
    """Rows B46 and B51: never a replay on the old addresses."""
    model, mapping = Store(), make_mapping()
    runner = BucketRunner(model, [4])
    call(runner, [3, 40], mapping=mapping)
    old = model.k_cache
    before = old.clone()
    if what == "mapping":
        mapping = mapping.clone()
        mapping[1:-1] = mapping[1:-1].flip(0)
    elif what == "cache":
        model.k_cache = torch.zeros(ROWS, 1, 2)
    else:
        model.v_cache.data = torch.zeros(ROWS, 1, 2)
    k, _ = call(runner, [5, 50], seed=1, mapping=mapping)
    want = torch.zeros(ROWS, 1, 2) if what == "cache" else before.clone()
    want[mapping[[5, 50]]] = k + 1
    assert torch.equal(model.k_cache[1:], want[1:])
    if what == "cache":
        assert torch.equal(old, before)
    elif what == "weight":
        assert torch.equal(model.v_cache[mapping[[5, 50]]], k)
    assert recorders[0].recordings == 2


def transpose(model):
    model.weight.data = model.weight.data.t()  # at the same address


def another_act(model):
    model.act = torch.nn.Tanh()


def deeper_act(model):
    model.act = torch.nn.Sequential(model.act, torch.nn.Tanh())


@pytest.mark.parametrize("change", [transpose, another_act, deeper_act])
def test_a_changed_module_renews_the_recording(recorders, change):
    model = Scaled()
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    assert torch.equal(runner(k=k), k @ model.weight)
    change(model)
    for _ in range(3):
        assert torch.equal(runner(k=k), model.act(k @ model.weight))
    assert recorders[0].recordings == 2


class Named(torch.nn.Module):
    """Adds what is called b and multiplies with what is called a, of each kind."""

    def __init__(self):
        super().__init__()
        self.register_parameter("a", torch.nn.Parameter(torch.tensor([2.0, 3.0])))
        self.register_parameter("b", None)
        self.more = torch.nn.ParameterDict({"a": torch.tensor([5.0, 7.0])})
        self.acts = torch.nn.ModuleDict({"a": torch.nn.Tanh()})

    def forward(self, k):
        k = k * self.a if self.a is not None else k + self.b
        k = k * self.more["a"] if "a" in self.more else k + self.more["b"]
        return self.acts["a"](k) if "a" in self.acts else 1 + self.acts["b"](k)


def into_a_free_place(model):
    model.b, model.a = model.a, None


def parameter_of_another_name(model):
    model.more["b"] = model.more.pop("a")


def submodule_of_another_name(model):
    model.acts["b"] = model.acts.pop("a")


@pytest.mark.parametrize(
    "change", [into_a_free_place, parameter_of_another_name, submodule_of_another_name]
)
def test_the_same_tensors_and_submodules_at_other_names_renew_the_recording(recorders, change):
    model = Named()
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    before = runner(k=k)
    change(model)
    for _ in range(3):
        out = runner(k=k)
        assert torch.equal(out, model(k)) and not torch.equal(out, before)
    assert recorders[0].recordings == 2


def hook_behind(act):
    return act.register_forward_hook(lambda act, args, out: out + 1)


def hook_ahead(act):
    return act.register_forward_pre_hook(lambda act, args: args[0] + 1)


@pytest.mark.parametrize("hook", [hook_behind, hook_ahead])
def test_a_hook_that_comes_or_goes_renews_the_recording(recorders, hook):
    model = Scaled()
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    runner(k=k)
    handle = hook(model.act)
    for _ in range(3):
        assert torch.equal(runner(k=k), k @ model.weight + 1)
    assert recorders[0].recordings == 2
    handle.remove()
    for _ in range(3):
        assert torch.equal(runner(k=k), k @ model.weight)
    assert recorders[0].recordings == 3


class Equal(torch.nn.Module):
    """Equal to all others of its class, as a dataclass may be."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, k):
        return k * self.factor

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


def test_another_submodule_that_says_it_is_equal_renews_the_recording(recorders):
    model = Scaled()
    model.act = Equal(2)
    runner = BucketRunner(model, [4])
    k = torch.randn(3, 2)
    runner(k=k)
    model.act = Equal(3)
    for _ in range(3):
        assert torch.equal(runner(k=k), k @ model.weight * 3)
    assert recorders[0].recordings == 2


def test_the_conjugate_of_a_buffer_renews_the_recording(recorders):
    """It lies at the same address."""
    model = Scaled()
    model.act = torch.nn.Identity()
    model.act.register_buffer("turns", torch.tensor([1 + 2j, 3 - 1j]))
    runner = BucketRunner(model, [4])
    runner(k=torch.randn(3, 2))
    model.act.turns = model.act.turns.conj()
    for _ in range(3):
        runner(k=torch.randn(3, 2))
    assert recorders[0].recordings == 2
