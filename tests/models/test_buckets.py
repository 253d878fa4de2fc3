"""Batches of `HybridGenerator` in buckets: the same tokens and rows, and what the sizes are."""

import pytest
import torch

from swa_compile import capturing
from swa_compile import runner as runner_module
from swa_compile.hf import HybridGenerator
from swa_compile.hf.bridge import Forward
from swa_compile.hf.buckets import bucket_sizes
from swa_compile.kv import check

from . import families, runs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PROMPTS = runs.prompts((21, 13, 3, 9, 2))


def hugging(model, prompt, count):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["gemma3_text", "phi3: longrope"])
def test_padded_batches_give_the_tokens_of_transformers(family):
    model = families.build(family)
    ours = HybridGenerator(
        model, max_tokens=300, max_requests=3, backend="swa_eager", capture_sizes=[2, 4], chunk=8
    )

    def poisoned(batch, forward=ours.forward):
        runs.poison(ours.pool)
        return forward(batch)

    runner, ours.forward = ours.forward, poisoned
    longrope = {"use_cache": False} if "longrope" in family else {}
    want = [
        model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False, **longrope)[
            0, len(p) :
        ].tolist()
        for p in PROMPTS
    ]
    assert ours.generate(PROMPTS, 12) == want
    check(ours.pool)
    decode = [use for use in runner.buckets if use.tokens == use.requests]
    assert sum(use.calls for use in decode) > 10
    assert runner.uncaptured >= 3  # prompts, by chunks of eight
    assert 1 <= len(ours.reports) <= 2


@pytest.mark.slow
@pytest.mark.inductor
def test_a_prompt_is_not_captured_and_decode_is(on_cpu):
    model = families.build("mistral", num_hidden_layers=2)
    ours = HybridGenerator(model, max_tokens=300, max_requests=4, capture_sizes=[2, 4], chunk=8)
    assert ours.generate(PROMPTS, 12) == [hugging(model, prompt, 12) for prompt in PROMPTS]
    captures = ours.reports[0].captures
    assert {label.split(" #")[0] for label in captures.memory} == {"2 tokens", "4 tokens"}
    assert captures.replays > 10


@pytest.mark.slow
@pytest.mark.inductor
def test_a_decode_step_is_recorded_around_the_model_and_sees_new_weights(on_cpu, monkeypatch):
    monkeypatch.setattr(runner_module, "recorder_for", capturing.recorder_for)  # the stand-in
    model = families.build("mistral", num_hidden_layers=2)
    ours = HybridGenerator(model, max_tokens=300, max_requests=4, capture_sizes=[2, 4], chunk=8)
    assert ours.generate(PROMPTS, 12) == [hugging(model, prompt, 12) for prompt in PROMPTS]
    *inside, around = on_cpu  # the last one was made when the code inside had run
    assert around.recordings == 2 and around.replays > 10
    assert sum(recorder.replays for recorder in inside) == 0
    captures = ours.reports[0].captures
    assert captures.full_replays == around.replays
    weight = model.model.layers[1].mlp.down_proj
    weight.weight = torch.nn.Parameter(weight.weight.flip(0) * 3)
    assert ours.generate(PROMPTS, 12) == [hugging(model, prompt, 12) for prompt in PROMPTS]
    assert around.recordings > 2
    check(ours.pool)


@pytest.mark.parametrize(
    ("asked", "backend", "options", "device", "requests", "sizes"),
    [
        (None, "swa", None, GPU, 16, (2, 4, 8, 16)),
        (None, "swa", {"cudagraphs": "full"}, GPU, 5, (2, 4, 5)),
        (None, "swa", {}, GPU, 1, (2,)),
        (None, "swa", {"capture_sizes": [3, 9]}, GPU, 16, (3, 9)),
        (None, "swa", {"cudagraphs": "off"}, GPU, 16, ()),
        (None, "swa", {"cudagraphs": "inductor"}, GPU, 16, ()),
        (None, "swa_eager", None, GPU, 16, ()),
        (None, "swa", None, CPU, 16, ()),
        ((), "swa", None, GPU, 16, ()),
        ([2, 4], "swa_eager", None, CPU, 16, (2, 4)),
        ([1, 4], "swa", None, GPU, 16, (2, 4)),  # a compiled forward has two rows at least
        (None, "swa", {"capture_sizes": [1, 4]}, GPU, 16, (2, 4)),
        ([1, 4], None, None, CPU, 16, (1, 4)),
    ],
)
def test_sizes_are_those_asked_for_or_powers_of_two_where_graphs_are_captured(
    asked, backend, options, device, requests, sizes
):
    assert bucket_sizes(asked, backend, options, device, requests) == sizes


def test_without_sizes_nothing_stands_around_the_forward():
    ours = HybridGenerator(families.build("mistral"), max_tokens=64, max_requests=2, backend=None)
    assert isinstance(ours.forward, Forward)
    with pytest.raises(ValueError, match="capture_sizes holds token counts of at least 1; got 0"):
        HybridGenerator(
            families.build("mistral"), max_tokens=64, max_requests=2, backend=None,
            capture_sizes=[0],
        )  # fmt: skip
