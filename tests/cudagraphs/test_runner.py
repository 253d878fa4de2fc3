"""`BucketRunner` on the CPU: padding, trimming, and captures with a stand-in recorder."""

import pytest
import torch

from swa_compile import runner as runner_module
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.runner import BucketRunner

from .recorder import FakeRecorder
from .runner_models import Store, call, make_mapping


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
    for step in range(4):
        k = torch.full((n, 1, 2), float(step))
        whole, flat, part, again, five = runner(k=k)
        assert again is whole and five == 5
        part.fill_(9.0)
        kept.append((step, whole, flat))
    for step, whole, flat in kept:  # also past later calls
        assert whole.flatten().tolist() == [step, 9.0] * n
        assert flat.flatten().tolist() == [step, 9.0] * n
