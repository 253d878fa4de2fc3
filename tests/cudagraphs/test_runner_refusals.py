"""What a `BucketRunner` refuses: arguments, bucket sizes, a second thread and another stream."""

import threading

import pytest
import torch

from swa_compile import runner as runner_module
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.runner import BucketRunner

from .runner_models import Store, call, make_mapping

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
