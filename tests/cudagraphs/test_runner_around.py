"""`BucketRunner(around=True)`: decode batches are recorded around code that captures itself."""

import pytest
import torch

from swa_compile import runner as runner_module
from swa_compile.bucket import Inputs, Sizes
from swa_compile.cudagraphs import CapturedGraph
from swa_compile.kv import HybridKVPool, LayerSpec
from swa_compile.ops import store_kv, translate_loc
from swa_compile.runner import BucketRunner

from .recorder import FakeRecorder


class Model(torch.nn.Module):
    """Scales ids by a weight and stores them, in code that captures itself; counts its calls."""

    def __init__(self, pool, *more, **options):
        super().__init__()
        self.pool, self.more, self.calls = pool, more, 0
        self.scale = torch.nn.Linear(1, 1, bias=False)
        self.recorder = FakeRecorder()
        # Inputs 0 and 1 are the caches, which are written; a cache may not be copied.
        inputs = Inputs(static=frozenset({0, 1, 2}), written=frozenset({0, 1}))
        self.graph = CapturedGraph(self.code, self.recorder, inputs=inputs, **options)

    def forward(self, batch):
        self.calls += 1
        ids, requests = batch.input_ids, len(batch.seq_lens)
        self.graph.sizes = Sizes(len(ids), len(ids) == requests)
        k, v = self.pool.k_cache(0), self.pool.v_cache(0)
        mapping = batch.full_to_swa_index_mapping
        values = [k, v, self.scale.weight, ids, batch.out_cache_loc, mapping, *self.more]
        return self.graph(values)[0]

    @staticmethod
    def code(values):
        k_cache, v_cache, weight, ids, out_cache_loc, mapping, *_ = values
        values.clear()
        rows = ids[:, None, None] * weight
        store_kv(k_cache, v_cache, rows, -rows, translate_loc(mapping, out_cache_loc))
        return [rows[:, 0, 0] * 2]


def make_pool():
    layers = [LayerSpec(kind="swa", kv_heads=1, k_dim=1, window=4)]
    made = HybridKVPool(layers, max_tokens=90, max_requests=6, swa_tokens=40, max_extend=8)
    first = made.open()
    for _ in range(6):  # full slots of the others are past the SWA pool
        made.batch({first: [1] * 8}, width=90)
    return made


@pytest.fixture
def pool():
    return make_pool()


@pytest.fixture
def outer(monkeypatch):
    """The recorder of what is recorded around."""
    recorder = FakeRecorder()
    monkeypatch.setattr(runner_module, "recorder_for", lambda device: recorder)
    return recorder


class Rows:
    """What the caches should hold, kept beside them; full slots are past the SWA pool's."""

    def __init__(self, pool):
        self.pool = pool
        self.k = pool.k_cache(0).clone()
        self.requests = [pool.open() for _ in range(3)]
        self.ids = 0

    def batch(self, lengths):
        pieces = {}
        for request, n in zip(self.requests, lengths, strict=False):
            pieces[request] = list(range(self.ids + 1, self.ids + n + 1))
            self.ids += n
        return self.pool.batch(pieces, width=30)

    def check(self, runner, lengths, weight):
        batch = self.batch(lengths)
        assert bool((batch.out_cache_loc > self.pool.swa_tokens).all())
        out = runner(batch)
        slots = batch.full_to_swa_index_mapping[batch.out_cache_loc]
        self.k[slots, 0, 0] = batch.input_ids * weight
        assert torch.equal(out, batch.input_ids * weight * 2)
        assert torch.equal(self.pool.k_cache(0)[1:], self.k[1:])
        assert torch.equal(self.pool.v_cache(0)[1:], -self.k[1:])


def weight_of(model):
    return model.scale.weight.item()


def test_a_replay_runs_nothing_of_the_function(pool, outer):
    model = Model(pool)
    runner, rows = BucketRunner(model, [2, 4], around=True, progress=False), Rows(pool)
    rows.check(runner, [1, 1, 1], weight_of(model))
    # The stand-in repeats by running the function; nothing else runs it.
    others = model.calls - outer.replays
    for lengths in ([1, 1], [1], [1, 1, 1]):
        rows.check(runner, lengths, weight_of(model))
    assert model.calls - outer.replays == others
    assert (outer.recordings, model.recorder.recordings) == (2, 0)


def test_the_record_of_the_code_inside_tells_of_it(pool, outer):
    model = Model(pool)
    runner, rows = BucketRunner(model, [2, 4], around=True, progress=False), Rows(pool)
    for lengths in ([1, 1, 1], [1, 1], [1]):
        rows.check(runner, lengths, weight_of(model))
    record = model.graph.captures
    assert record.captures == 2 and record.replays == record.full_replays == outer.replays
    assert {label: r.whole for label, r in record.recorded.items()} == {
        "2 tokens": True,
        "4 tokens": True,
    }
    assert record.uncaptured == model.calls - outer.recordings - outer.replays
    assert sum(use.graph_bytes for use in runner.buckets) == outer.memory()


def test_other_batches_are_left_to_the_code_inside(pool, outer):
    model = Model(pool)
    runner, rows = BucketRunner(model, [2, 4, 8], around=True, progress=False), Rows(pool)
    for lengths in ([1, 1], [3, 1], [2, 1, 1], [3, 1], [1, 1, 1]):
        rows.check(runner, lengths, weight_of(model))
    assert outer.recordings == 3
    assert model.recorder.recordings and model.recorder.replays


def test_what_cannot_be_recorded_around_is_left_to_the_code_inside(pool, outer):
    model = Model(pool)
    outer.fail = lambda number: (_ for _ in ()).throw(RuntimeError("not inside a capture"))
    runner, rows = BucketRunner(model, [2, 4], around=True, progress=False), Rows(pool)
    with pytest.warns(UserWarning, match="left to the captures of the code inside.*not inside a"):
        rows.check(runner, [1, 1], weight_of(model))
    for lengths in ([1], [1, 1, 1], [1, 1], [1, 1, 1]):
        rows.check(runner, lengths, weight_of(model))
    assert not outer.replays and model.recorder.recordings == 2 and model.recorder.replays > 3
    assert all(recorded.whole for recorded in model.graph.captures.recorded.values())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda pool: Model(pool, obstacle=("it asks the host", "m.py:3")), "it asks the host"),
        (lambda pool: Model(pool, object()), "is a object, which no graph takes"),
    ],
    ids=["an operator", "an input"],
)
def test_what_the_code_inside_must_not_have_recorded_is_not_recorded_around(pool, outer, make, why):
    model = make(pool)
    runner, rows = BucketRunner(model, [2, 4], around=True, progress=False), Rows(pool)
    with pytest.warns(UserWarning, match=why):
        rows.check(runner, [1, 1], weight_of(model))
    for lengths in ([1], [1, 1, 1], [1, 1]):
        rows.check(runner, lengths, weight_of(model))
    assert not outer.replays and not model.recorder.replays
    assert why in " ".join(skip.message for skip in model.graph.captures.skipped)


@pytest.mark.parametrize("what", ["weight", "layer", "cache", "pool"])
def test_what_is_replaced_is_recorded_anew(pool, outer, what):
    model = Model(pool)
    runner, rows = BucketRunner(model, [2], around=True, progress=False), Rows(pool)
    rows.check(runner, [1, 1], weight_of(model))
    if what == "weight":
        model.scale.weight = torch.nn.Parameter(torch.full((1, 1), 3.0))
    elif what == "layer":
        model.scale = torch.nn.Linear(1, 1, bias=False)
    elif what == "cache":
        for name, buffer in list(pool.named_buffers(recurse=False)):
            if buffer.dtype == torch.float32:
                setattr(pool, name, buffer.clone())
    else:
        old = pool.k_cache(0).clone()
        model.pool = make_pool()
        rows = Rows(model.pool)
    for _ in range(4):
        rows.check(runner, [1, 1], weight_of(model))
    assert outer.recordings == 2 and not model.recorder.recordings
    if what == "pool":
        assert torch.equal(pool.k_cache(0)[1:], old[1:])
