"""Speculative decoding gives the target's own tokens in every graph mode, with one wait a round."""

import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from swa_compile.hf import SpeculativeGenerator

pytest.importorskip("transformers")

_spec = importlib.util.spec_from_file_location(
    "model_families", Path(__file__).parents[1] / "models" / "families.py"
)
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

PROMPTS = [[5 + (7 * i * i + 3 * j) % 80 for j in range(n)] for i, n in enumerate((21, 13, 3, 9))]


def alone(model, prompt, count):
    ids = torch.tensor([prompt], device="cuda")
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def noisy(model):
    """A draft that is right now and then."""
    draft = copy.deepcopy(model)
    random = torch.Generator(device="cuda").manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() >= 2:
                noise = torch.randn(weight.shape, generator=random, device="cuda")
                weight += 0.1 * weight.std() * noise
    return draft


@pytest.mark.parametrize("mode", ["off", "full", "piecewise", "auto"])
def test_tokens_are_the_targets_own_in_every_mode(mode):
    torch._dynamo.reset()
    kinds = ["sliding_attention", "full_attention"]
    model = families.build(
        "gemma3_text", head_dim=32, num_hidden_layers=2, layer_types=kinds
    ).cuda()
    ours = SpeculativeGenerator(
        model,
        noisy(model),
        draft_tokens=3,
        max_tokens=300,
        max_requests=3,
        options={"cudagraphs": mode, "strict": False},
    )
    want = [alone(model, prompt, 24) for prompt in PROMPTS]
    for _ in range(2):  # the second time all sizes have been met
        assert ours.generate(PROMPTS, 24) == want
    assert 0 < ours.acceptance.rate < 1
    assert {report.translation_nodes for report in [*ours.reports, *ours.draft.reports]} == {1}
    for reports in (ours.reports, ours.draft.reports):
        captured = [report.captures for report in reports if report.captures is not None]
        replays = sum(captures.replays for captures in captured)
        assert (replays > 0) == (mode != "off")


def test_a_round_waits_for_the_device_once():
    torch._dynamo.reset()
    model = families.build("mistral", head_dim=32, num_hidden_layers=2).cuda()
    ours = SpeculativeGenerator(
        model,
        noisy(model),
        draft_tokens=3,
        max_tokens=300,
        max_requests=3,
        options={"cudagraphs": "off"},
    )
    want = ours.generate(PROMPTS, 24)
    rounds, verify = [], ours.verify

    def counted(turns, drafts):
        rounds.append(len(turns))
        return verify(turns, drafts)

    ours.verify = counted
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert ours.generate(PROMPTS, 24) == want
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    assert 0 < len(waits) <= len(rounds)
