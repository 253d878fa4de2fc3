"""A recorder for the CPU, as honest as CUDA graphs are.

Recording executes nothing: every storage that the function could reach is put back, and what it
returns holds garbage. A replay runs the function again on the very tensors that were recorded, and
writes what it returns into the tensors that were returned then.
"""

import contextlib
import gc

import torch

from swa_compile.recording import CaptureError

GARBAGE = 77


class FakeRecorder:
    running = False  # one of them records or repeats: what that calls is part of it

    def __init__(self, device=None, fail=None):
        self.device = torch.device("cpu")
        self.fail = fail  # called with the number of the recording; an exception fails it
        self.recordings = 0
        self.replays = 0
        self.capturing = False
        self.current_stream = 0
        self.inside_islands = 0
        self.island_keys = []

    def busy(self):
        return self.capturing or FakeRecorder.running

    def stream(self):
        return self.current_stream

    def record(self, run):
        assert not self.inside_islands, "a recording would allocate from the pool of the islands"
        number, self.recordings = self.recordings, self.recordings + 1
        before = [(tensor, tensor.clone()) for tensor in all_tensors()]
        try:
            if self.fail is not None:
                self.fail(number)
            out = self._inside(run)
        except Exception as error:
            raise CaptureError(str(error)) from error
        finally:
            with torch.no_grad():
                for tensor, content in before:
                    tensor.copy_(content)
        given = {tensor.untyped_storage().data_ptr() for tensor, _ in before}
        fresh = {
            i: t
            for i, t in enumerate(out)
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given
        }
        for tensor in fresh.values():
            tensor.fill_(GARBAGE)

        def replay():
            self.replays += 1
            again = self._inside(run)
            for i, tensor in fresh.items():
                _memory(tensor).copy_(_memory(again[i]))

        return replay, out

    @staticmethod
    def _inside(run):
        FakeRecorder.running = True
        try:
            return run()
        finally:
            FakeRecorder.running = False

    def borrow(self, tensor):
        return tensor

    @contextlib.contextmanager
    def islands(self, bucket):
        self.inside_islands += 1
        self.island_keys.append(bucket)
        try:
            yield
        finally:
            self.inside_islands -= 1

    def current(self):
        return contextlib.nullcontext()

    def profiled(self):
        return torch.autograd._profiler_enabled()

    def memory(self):
        return 1000 * self.recordings


def all_tensors():
    """One tensor over the whole of each live storage."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return list(found.values())


def _memory(tensor):
    """All bytes that it lies in: an expanded tensor has one element several times."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
