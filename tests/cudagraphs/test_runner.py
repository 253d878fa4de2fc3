"""`BucketRunner` on the CPU: padding, trimming, refusals, and captures with a stand-in recorder."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from swa_compile import runner as runner_module
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec
from swa_compile.ops import store_kv, translate_loc
from swa_compile.runner import BucketRunner

from .recorder import FakeRecorder

FULL, ROWS = 96, 24


def make_mapping():
    ids = torch.arange(FULL + 1) % (ROWS - 1) + 1
    ids[0], ids[-1] = 0, -1
    return ids


class Store(torch.nn.Module):
    """Stores 1 + k at the translated ids; returns rows of tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(ROWS, 1, 2))
        self.register_buffer("v_cache", torch.zeros(ROWS, 1, 2))
        self.sizes = []

    def forward(self, out_cache_loc, k, full_to_swa_index_mapping):
        self.sizes.append(len(k))
        loc = translate_loc(full_to_swa_index_mapping, out_cache_loc)
        store_kv(self.k_cache, self.v_cache, k + 1, k, loc)
        return k * 2, {"loc": loc, "count": 3, "none": None, "in": k}


def call(runner, ids, seed=0, mapping=None, dtype=torch.int64):
    k = torch.randn(len(ids), 1, 2, generator=torch.Generator().manual_seed(seed))
    mapping = make_mapping() if mapping is None else mapping
    loc = torch.tensor(ids, dtype=dtype)
    return k, runner(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)


@pytest.fixture
def recorders(monkeypatch):
    made = []

    def recorder_for(device):
        made.append(FakeRecorder())
        return made[-1]

    monkeypatch.setattr(runner_module, "recorder_for", recorder_for)
    return made


def test_every_size_is_padded_to_the_next_bucket_and_cut_again():
    """Row B49; a batch past the largest bucket runs as it is."""
    model = Store()
    runner = BucketRunner(model, [2, 8, 4])
    for n in (8, 2, 1, 0, 3, 64):
        model.sizes.clear()
        ids = list(range(1, min(n, 20) + 1)) + [-1] * (n - 20)
        k, (out, rest) = call(runner, ids)
        assert torch.equal(out, k * 2)
        assert rest["count"] == 3 and rest["none"] is None
        assert torch.equal(rest["loc"], make_mapping()[torch.tensor(ids, dtype=torch.int64)])
        assert model.sizes[-1] == {8: 8, 2: 2, 1: 2, 0: 2, 3: 4, 64: 64}[n]
    assert [(use.tokens, use.calls, use.padding) for use in runner.buckets] == [
        (2, 3, 3),
        (4, 1, 1),
        (8, 1, 0),
    ]
    assert runner.uncaptured == 1
    assert all(use.buffer_bytes == use.tokens * (8 + 8) for use in runner.buckets)


def test_a_shorter_batch_leaves_nothing_of_the_longer_one(recorders):
    """Rows A7 and B01: lanes 6 to 8 of the first batch are not written again by the second."""
    model = Store()
    runner = BucketRunner(model, [8])
    call(runner, list(range(1, 9)))
    want = model.k_cache.clone()
    k, _ = call(runner, list(range(9, 14)), seed=1)
    for slot, row in zip(make_mapping()[9:14], k, strict=True):
        want[slot] = row + 1
    assert torch.equal(model.k_cache[1:], want[1:])
    assert recorders[0].replays


def test_capturing_ahead_writes_the_sink_alone(recorders):
    """Row B15."""
    model = Store()
    model.k_cache.normal_()
    before = model.k_cache.clone()
    runner = BucketRunner(model, [1, 4, 2], progress=False)
    loc, k, mapping = torch.tensor([5, 6]), torch.ones(2, 1, 2), make_mapping()
    runner.capture(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)
    assert torch.equal(model.k_cache[1:], before[1:])
    (recorder,) = recorders
    assert recorder.recordings == 3
    sizes = [use.tokens for use in runner.buckets if use.graph_bytes]
    assert sizes == [1, 2, 4]
    assert model.sizes[0] == 4  # the largest first
    call(runner, [5, 6], mapping=mapping)
    assert recorder.recordings == 3
    with pytest.raises(CaptureUseError, match="already"):
        runner.capture(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)


def test_replays_read_live_contents(recorders):
    """Row A6: ids, rows and the mapping change; the mapping also in place."""
    model, mapping = Store(), make_mapping()
    runner = BucketRunner(model, [4])
    want = model.k_cache.clone()
    for step in range(6):
        mapping[1:-1] = mapping[1:-1].roll(1)
        ids = [1 + 3 * step, 30 + step, 60 + step]
        k, (out, rest) = call(runner, ids, seed=step, mapping=mapping)
        for i, row in zip(ids, k, strict=True):
            want[mapping[i]] = row + 1
        assert torch.equal(model.k_cache[1:], want[1:])
        assert torch.equal(out, k * 2) and torch.equal(rest["in"], k)
    assert recorders[0].recordings == 1


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


class Scaled(torch.nn.Module):
    """The rows of k times the columns of a weight, behind a submodule."""

    def __init__(self):
        super().__init__()
        self.act = torch.nn.Identity()
        self.weight = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2), requires_grad=False)

    def forward(self, k):
        return self.act(k @ self.weight)


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


class RunsNothing(FakeRecorder):
    """A replay calls no Python, as that of a CUDA graph does not; nor does it compute."""

    def record(self, run):
        _, out = super().record(run)
        return lambda: None, out


def test_each_recording_keeps_the_nesting_of_its_outputs(monkeypatch):
    """Two layouts of a live input, and one size of batches."""
    recorder = RunsNothing()
    monkeypatch.setattr(runner_module, "recorder_for", lambda device: recorder)

    def nested(k, mask):
        return {"twice": k * 2, "mask": mask + 1} if len(mask) == 2 else (k * 3, [])

    runner = BucketRunner(nested, [4], live=("mask",))
    two, three = torch.ones(2), torch.ones(3)
    for _ in range(4):
        tripled, empty = runner(k=torch.ones(3, 2), mask=three)
        assert tripled.shape == (3, 2) and empty == []
        out = runner(k=torch.ones(3, 2), mask=two)
        assert out["twice"].shape == (3, 2) and out["mask"].shape == (2,)
    assert recorder.recordings == 2


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


def test_outputs_kept_past_later_calls_stay(recorders):
    runner = BucketRunner(Store(), [4])
    kept = [call(runner, [i + 1, i + 2], seed=i) for i in range(5)]
    for k, (out, rest) in kept:
        assert torch.equal(out, k * 2)
        assert torch.equal(rest["in"], k)


@pytest.mark.parametrize("n", [4, 3])
def test_inputs_given_back_in_parts_and_twice_stay_one_memory(n):
    """Eager code gives the caller's tensor and its view; the static input is nobody's to keep."""
    runner = BucketRunner(lambda k: [k, k.view(-1, 2), k[:, :, 1:], k, 5], [4])
    kept = []
    for call in range(4):
        k = torch.full((n, 1, 2), float(call))
        whole, flat, part, again, five = runner(k=k)
        assert again is whole and five == 5
        part.fill_(9.0)
        kept.append((call, whole, flat))
    for call, whole, flat in kept:  # also past later calls
        assert whole.flatten().tolist() == [call, 9.0] * n
        assert flat.flatten().tolist() == [call, 9.0] * n


BAD = {
    "missing": (lambda a: a.pop("k"), TypeError, "missing input k"),
    "unknown": (lambda a: a.update(q=a["k"]), TypeError, "unknown input q"),
    "dtype": (lambda a: a.update(k=a["k"].double()), TypeError, "k is torch.float32; got torch.fl"),
    "rank": (lambda a: a.update(k=a["k"][0]), ValueError, r"k has shape \[rows, 1, 2\]"),
    "row": (lambda a: a.update(k=a["k"][..., :1]), ValueError, r"\[rows, 1, 2\]; got \(3, 1, 1\)"),
    "device": (lambda a: a.update(k=a["k"].to("meta")), ValueError, "k is on cpu; got meta"),
    "tokens": (lambda a: a.update(k=a["k"][:2]), ValueError, "k has 3 rows for 3 tokens.*got 2"),
    "no tensor": (lambda a: a.update(k=3), TypeError, "k is a tensor; got int"),
}


@pytest.mark.parametrize(("change", "error", "text"), BAD.values(), ids=BAD)
def test_a_bad_call_is_refused_before_anything_is_written(change, error, text):
    model = Store()
    runner = BucketRunner(model, [4])
    call(runner, [3, 40, 7])
    (static, _), *_ = runner._buckets.values()
    before = [model.k_cache.clone(), *[b.clone() for b in static.buffers.values()]]
    args = {
        "out_cache_loc": torch.tensor([1, 2, 3]),
        "k": torch.ones(3, 1, 2),
        "full_to_swa_index_mapping": make_mapping(),
    }
    change(args)
    with pytest.raises(error, match=text):
        runner(**args)
    after = [model.k_cache, *static.buffers.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [([], ValueError), ([0], ValueError), ([2.0], TypeError), ([True], TypeError)],
)
def test_bad_buckets_are_refused(sizes, error):
    with pytest.raises(error, match="capture_sizes"):
        BucketRunner(Store(), sizes)


def test_a_second_thread_and_another_stream_are_refused(monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def fn(k):
        entered.set()
        assert leave.wait(10)
        return k

    leave.set()
    runner = BucketRunner(fn, [4])
    runner(k=torch.ones(2))
    entered.clear()
    leave.clear()
    first = threading.Thread(target=lambda: runner(k=torch.ones(2)))
    first.start()
    assert entered.wait(10)
    with pytest.raises(CaptureUseError, match="for each thread"):
        runner(k=torch.ones(2))
    leave.set()
    first.join()
    monkeypatch.setattr(runner_module, "_stream", lambda device: 7)
    with pytest.raises(CaptureUseError, match="another stream"):
        runner(k=torch.ones(2))


# Batches with requests


def seen(batch):
    """What a forward gets, a row a token and a row a request."""
    return {
        "ids": batch.input_ids * 1,
        "loc": batch.out_cache_loc * 1,
        "lens": batch.seq_lens * 1,
        "table": batch.page_table * 1,
        "cu": batch.cu_seqlens_q.clone()[None],
    }


@pytest.fixture
def pool():
    specs = [LayerSpec("full", 1, 2), LayerSpec("swa", 1, 2, window=8)]
    return HybridKVPool(specs, max_tokens=64, max_requests=6)


def test_decode_pads_requests_along(pool):
    runner = BucketRunner(seen, [4, 8])
    requests = [pool.open() for _ in range(3)]
    for _ in range(2):
        batch = pool.batch({r: [7] for r in requests}, width=4)
        out = runner(batch)
        assert torch.equal(out["ids"], batch.input_ids) and torch.equal(
            out["loc"], batch.out_cache_loc
        )
        assert torch.equal(out["lens"], batch.seq_lens)
        assert torch.equal(out["table"], batch.page_table)
        assert out["cu"].tolist() == [[0, 1, 2, 3, 3]]
    assert [(use.tokens, use.requests) for use in runner.buckets] == [(4, 4), (8, 8)]


def test_extend_pads_tokens_and_requests_apart(pool):
    """Rows a token are told from rows a request also where both fall into one bucket."""
    runner = BucketRunner(seen, [4, 8])
    a, b, c = (pool.open() for _ in range(3))
    batch = pool.batch({a: [1, 2, 3], b: [4], c: [5, 6, 7]}, width=4)
    out = runner(batch)
    assert torch.equal(out["ids"], batch.input_ids)
    assert torch.equal(out["lens"], batch.seq_lens)
    assert out["cu"].tolist() == [[0, 3, 4, 7, 7]]
    pieces = {pool.open(): [1, 2], pool.open(): [3], pool.open(): [4]}
    batch = pool.batch(pieces, width=4)
    out = runner(batch)  # 4 tokens of 3 requests: both would be 4
    assert torch.equal(out["ids"], batch.input_ids)
    assert torch.equal(out["lens"], batch.seq_lens)
    assert (4, 5) in [(use.tokens, use.requests) for use in runner.buckets]


def test_an_idle_rank_runs_the_smallest_bucket(pool):
    runner = BucketRunner(seen, [4, 8])
    out = runner(pool.batch({}, width=4))
    assert out["ids"].shape == (0,) and out["table"].shape == (0, 4)
    assert out["cu"].tolist() == [[0] * 5]


def test_a_batch_is_padded_as_forward_batch_pads_it(pool):
    got = []
    runner = BucketRunner(lambda batch: got.append(batch), [8])
    request = pool.open()
    runner(pool.batch({request: [1, 2, 3]}, width=8))
    batch = pool.batch({request: [4, 5]}, width=8)
    runner(batch)
    want = batch.pad(8, 9)
    for name, tensor in vars(want).items():
        assert torch.equal(getattr(got[-1], name), tensor), name
    assert got[-1].full_to_swa_index_mapping is pool.full_to_swa_index_mapping


def test_the_way_of_calling_stays(pool):
    runner = BucketRunner(lambda batch: None, [8])
    batch = pool.batch({pool.open(): [1]}, width=4)
    runner(batch)
    with pytest.raises(TypeError, match="ForwardBatch; got keyword"):
        runner(**vars(batch))
    with pytest.raises(TypeError, match="not both"):
        runner(batch, input_ids=batch.input_ids)
    with pytest.raises(TypeError, match="expected a ForwardBatch; got int"):
        runner(3)
    assert isinstance(batch, ForwardBatch)
