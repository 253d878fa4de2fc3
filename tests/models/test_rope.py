"""RoPE that goes by the length of each request, and not of the batch."""

import copy

import pytest
import torch

from swa_compile.hf import Bridge, HybridGenerator, UnsupportedModel
from swa_compile.hf.rope import LengthRope, RopeBatch
from swa_compile.runner import BucketRunner

from . import families, runs

VARIANTS = ["gemma3_text: dynamic RoPE on full layers", "mistral: dynamic RoPE", "phi3: longrope"]
BORDER = 16


def generator(model, **sizes):
    return HybridGenerator(
        model, **{"max_tokens": 256, "max_requests": 3, "backend": None, "chunk": 8, **sizes}
    )


def run(ours, steps=20):
    return runs.Decoding(ours.forward, ours.pool, runs.prompts(), width=ours.width).run(steps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_length_for_the_whole_batch_as_transformers_takes_it_would_be_seen(
    variant, monkeypatch
):
    ours = generator(families.build(variant))
    assert runs.logit_error(ours.bridge.model, run(ours)) < 1e-4
    keywords = type(ours.bridge.adaptation).keywords

    def of_the_longest(self, positions, rope_lengths):
        return keywords(self, positions, torch.full_like(rope_lengths, int(rope_lengths.max())))

    monkeypatch.setattr(type(ours.bridge.adaptation), "keywords", of_the_longest)
    ours = generator(families.build(variant))
    assert runs.logit_error(ours.bridge.model, run(ours)) > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chunk_of_a_prompt_goes_by_the_whole_prompt(variant):
    """The first chunks of a prompt end below the border and the prompt beyond it."""
    model = families.build(variant)
    for length in (BORDER, BORDER + 1, 40):
        prompt = runs.prompts((length,))[0]
        want = runs.eager_rows(model, prompt, length)[-1]
        for chunk in (5, 8, 64):
            got = generator(model, chunk=chunk).prefill([prompt])[0]
            assert float((got - want).abs().max() / want.abs().max()) < 1e-4, (length, chunk)


def test_longrope_computes_a_request_anew_once_when_it_grows_past_the_border():
    ours = generator(families.build("phi3: longrope"))
    sizes = []

    def watched(batch, forward=ours.forward):
        sizes.append(len(batch.input_ids))
        return forward(batch)

    ours.forward = watched
    prompt = runs.prompts((BORDER - 2,))[0]
    tokens = ours.generate([prompt], 6)[0]
    # Chunks of 8: the prompt, two tokens, then all seventeen anew, then two tokens.
    assert sizes == [8, 6, 1, 1, 8, 8, 1, 1, 1]
    assert tokens == runs.generated(ours.bridge.model, prompt, 6)
    assert ours.pool.full_free == ours.pool.full_tokens


def test_a_pool_that_holds_one_request_at_a_time_has_room_for_its_second_beginning():
    model = families.build("phi3: longrope")
    ours = generator(model, max_tokens=30, max_requests=1, chunk=8)
    prompts = runs.prompts((3, 13))
    assert ours.generate(prompts, 16) == [runs.generated(model, p, 16) for p in prompts]


def test_dynamic_rope_restarts_nothing():
    ours = generator(families.build("mistral: dynamic RoPE"))
    assert ours.bridge.adaptation.restart_at is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_model_met_before_changes_nothing(variant):
    """transformers keeps the longest length it has met; the bridge does not ask it."""
    model = families.build(variant)
    prompt = runs.prompts((13,))[0]
    want = generator(copy.deepcopy(model)).generate([prompt], 12)
    runs.eager_logits(model, runs.prompts((60,))[0])
    assert generator(model).generate([prompt], 12) == want


def test_the_model_has_its_own_rope_back_after_a_forward():
    model = families.build("phi3: longrope")
    own = model.model.rotary_emb
    generator(model).generate(runs.prompts(), 3)
    assert model.model.rotary_emb is own
    assert not any(isinstance(part, LengthRope) for part in model.modules())


def test_a_batch_that_does_not_tell_the_lengths_is_refused():
    bridge = Bridge(families.build("phi3: longrope"))
    pool = bridge.make_pool(max_tokens=20, max_requests=1)
    batch = pool.batch({pool.open(): [3, 4]})
    with pytest.raises(TypeError, match=r"make batches with Bridge\.batch"):
        bridge.forward(batch, pool)


def test_padding_a_batch_pads_its_lengths_with_zeros():
    bridge = Bridge(families.build("phi3: longrope"))
    pool = bridge.make_pool(max_tokens=20, max_requests=2)
    batch = bridge.batch(pool, [(pool.open(), [3, 4]), (pool.open(), [5])], [9, 1])
    assert batch.rope_lengths.tolist() == [9, 9, 1]
    padded = batch.pad(5, 3)
    padded.validate()
    assert isinstance(padded, RopeBatch) and padded.rope_lengths.tolist() == [9, 9, 1, 0, 0]
    assert padded.seq_lens.tolist() == [2, 1, 0]


@pytest.mark.parametrize("variant", ["mistral: dynamic RoPE", "phi3: longrope"])
def test_a_bucket_runner_hands_the_lengths_on(variant):
    model = families.build(variant)
    ours = generator(model)
    ours.forward = BucketRunner(ours.forward, [4, 8, 24], progress=False)
    prompts = runs.prompts()
    assert ours.generate(prompts, 20) == [runs.generated(model, p, 20) for p in prompts]
    assert sum(bucket.calls for bucket in ours.forward.buckets) > 20


def test_longrope_with_several_borders_is_refused_by_name():
    model = families.build("phi3: longrope")
    second = copy.deepcopy(model.model.rotary_emb)
    second.config = copy.deepcopy(second.config)
    second.config.rope_parameters["original_max_position_embeddings"] = 32
    model.model.second_rope = second
    with pytest.raises(UnsupportedModel, match=r"longrope.*several borders: \[16, 32\]"):
        Bridge(model)
