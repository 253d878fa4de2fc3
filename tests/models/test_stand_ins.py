"""What stands in for parts of a model during a forward, and that it computes the same."""

import pytest
import torch

from swa_compile.hf import Bridge, UnsupportedModel
from swa_compile.hf.experts import GroupedExperts, grouped_experts
from swa_compile.hf.stand_ins import StandIn, standing_in
from swa_compile.hf.token_positions import TokenPositions

from . import families, runs

EXPERTS = "step3p7: experts"


def experts(model):
    return [part for part in model.modules() if type(part).__name__ == "Step3p7Experts"]


def test_experts_that_loop_are_grouped_and_no_others_are():
    assert len(grouped_experts(families.build(EXPERTS))) == 3
    for family in ("step3p7", "gpt_oss", "mixtral", "qwen3_moe", "llama4_text"):
        assert not grouped_experts(families.build(family))


def test_grouped_experts_give_what_the_loop_gives():
    model = families.build(EXPERTS)
    random = torch.Generator().manual_seed(3)
    clamped = experts(model)[0]
    assert clamped.limit == 0.5  # of the gate, which the grouped product applies too
    for original in experts(model):
        x = torch.randn(7, 64, generator=random)
        share, index = torch.rand(7, 4, generator=random).topk(2)
        with torch.no_grad():
            want, got = original(x, index, share), GroupedExperts(original)(x, index, share)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_grouped_experts_use_the_weights_that_the_model_has_now():
    original = experts(families.build(EXPERTS))[0]
    grouped = GroupedExperts(original)
    original.down_proj = torch.nn.Parameter(torch.zeros_like(original.down_proj))
    index = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        assert not grouped(torch.ones(2, 64), index, torch.ones(2, 1)).any()
    assert not list(grouped.parameters())


def test_experts_that_compute_something_else_are_refused_by_name():
    model = families.build(EXPERTS)
    part = experts(model)[0]
    original = part.forward
    part.forward = lambda x, index, share: 2 * original(x, index, share)
    with pytest.raises(UnsupportedModel, match=r"Step3p7Experts\) are a Python loop.*differ by"):
        Bridge(model)


def test_parts_are_put_back_when_a_forward_fails():
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2))
    own = parent[0]
    one = StandIn(parent, "0", torch.nn.Identity())

    def failing():
        with standing_in([one]):
            assert isinstance(parent[0], torch.nn.Identity)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert parent[0] is own


def test_the_model_has_its_experts_back_after_a_forward():
    model = families.build(EXPERTS)
    before = experts(model)
    bridge = Bridge(model)
    pool = bridge.make_pool(max_tokens=20, max_requests=1)
    bridge.forward(bridge.batch(pool, [(pool.open(), [3, 4])], [2]), pool)
    assert experts(model) == before


def test_positions_that_a_layer_counts_are_those_handed_in():
    positions = torch.tensor([4, 5, 0, 17])
    counted = torch.arange(4) + TokenPositions(positions).get_seq_length(1)
    assert counted.tolist() == positions.tolist()


def test_positions_counted_from_zero_would_be_seen():
    """Llama 4 without what stands for its cache: the control."""
    model = families.build("llama4_text: temperature tuning")
    bridge = Bridge(model)
    bridge.adaptation._counts_positions = False
    pool = bridge.make_pool(max_tokens=40, max_requests=1)
    prompt, request = runs.prompts()[0], pool.open()
    for start in range(0, 21, 8):
        piece = prompt[start : start + 8]
        logits = bridge.forward(pool.batch({request: piece}), pool)[0]
    want = runs.eager_logits(model, prompt)[-1]
    assert float((logits - want).abs().max() / want.abs().max()) > 1e-2
