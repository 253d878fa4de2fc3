"""What the backend says where nothing can be captured, and what it falls back to."""

import warnings

import pytest
import torch
from torch._inductor import utils

import swa_compile
from swa_compile import capturing, inductor
from swa_compile.bucket import Sizes
from swa_compile.call_sizes import CallSizes
from swa_compile.ops import paged_attention
from swa_compile.options import Options


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def double(x):
    return x * 2


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_an_explicit_mode_on_the_cpu_is_a_skip(mode):
    call = torch.compile(double, backend="swa", options={"cudagraphs": mode})
    with pytest.warns(UserWarning, match=f"CAPTURE_SKIPPED: cudagraphs='{mode}' was asked for"):
        assert call(torch.ones(2)).tolist() == [2, 2]
    strict = torch.compile(double, backend="swa", options={"cudagraphs": mode, "strict": True})
    with pytest.raises(Exception, match="CAPTURE_SKIPPED"):
        strict(torch.ones(3))


def test_auto_on_the_cpu_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with swa_compile.collect() as reports:
            torch.compile(double, backend="swa")(torch.ones(2))
    assert reports[0].captures is None


def test_a_torch_that_cannot_wrap_pieces_gets_its_own_trees(monkeypatch):
    monkeypatch.delattr(utils, "_unstable_customized_partition_wrapper")
    assert not inductor.can_wrap()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for mode in ("full", "piecewise", "auto"):
        with pytest.warns(UserWarning, match=rf"'{mode}' uses torch's cudagraph trees"):
            assert capturing.with_wrapping(Options(cudagraphs=mode)).cudagraphs == "inductor"
    for mode in ("off", "inductor"):
        assert capturing.with_wrapping(Options(cudagraphs=mode)).cudagraphs == mode
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capturing.with_wrapping(Options()).cudagraphs == "auto"


def test_this_torch_can_wrap_pieces():
    assert inductor.can_wrap()


def test_what_inductor_was_given_is_put_back():
    before = utils._unstable_customized_partition_wrapper.wrapper
    post_compile = torch._inductor.output_code.CompiledFxGraph.post_compile
    with pytest.raises(ZeroDivisionError), inductor._wrapped(lambda code: code.run):
        raise ZeroDivisionError
    assert utils._unstable_customized_partition_wrapper.wrapper is before
    assert torch._inductor.output_code.CompiledFxGraph.post_compile is post_compile


def sizes_of(forward, *args, split_ops=("swa::paged_attention",), dynamic=True):
    """The sizes that are read off Dynamo's graph, for calls with other arguments."""
    found = []

    def backend(gm, example_inputs):
        from swa_compile.naming import input_names

        rule = CallSizes(gm, input_names(gm), split_ops)

        def call(*inputs):
            found.append(rule(inputs))
            return gm.forward(*inputs)

        return call

    compiled = torch.compile(forward, backend=backend, dynamic=dynamic)
    return compiled, found


def batch(n, requests):
    lens, cu = torch.full((requests,), 2).int(), torch.linspace(0, n, requests + 1).int()
    cache = torch.ones(9, 1, 4)
    return torch.ones(n, 1, 4), cache, cache, torch.ones(requests, 2).int(), lens, cu


@pytest.mark.parametrize("marked", [False, True])
def test_tokens_and_decode_are_read_off_the_sizes(marked):
    compiled, found = sizes_of(lambda *args: paged_attention(*args), *batch(4, 4))
    for n, requests in ((4, 4), (5, 5), (6, 3), (4, 4), (3, 6)):
        args = batch(n, requests)
        if marked:
            swa_compile.mark_sizes(args[0], *args[3:])
        compiled(*args)
    assert found == [Sizes(n, n == b) for n, b in ((4, 4), (5, 5), (6, 3), (4, 4), (3, 6))]


def test_a_graph_without_a_cut_counts_the_ids_it_writes():
    def forward(out_cache_loc, x):
        return out_cache_loc + 1, x * 2

    compiled, found = sizes_of(forward)
    for n in (3, 4, 5):
        compiled(torch.arange(n), torch.ones(7))
    assert found == [Sizes(n, True) for n in (3, 4, 5)]


def test_a_graph_that_tells_nothing_has_no_tokens():
    compiled, found = sizes_of(double)
    compiled(torch.ones(3))
    assert found == [Sizes(None, True)]
