"""transformers models generate over the pool in every graph mode what they generate alone."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from swa_compile.hf import HybridGenerator, Sampling
from swa_compile.runner import BucketRunner

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


def run(family, mode, experts=None):
    """The tokens in a graph mode, held against transformers'; the records of captures."""
    torch._dynamo.reset()
    # Heads of a dimension that the fused kernel and the attention kernel work on without padding.
    model = families.build(family, head_dim=32).cuda()
    if experts is not None:
        model.set_experts_implementation(experts)
    ours = HybridGenerator(
        model, max_tokens=300, max_requests=3, options={"cudagraphs": mode, "strict": False}
    )
    assert ours.generate(PROMPTS, 24) == [alone(model, prompt, 24) for prompt in PROMPTS]
    assert sum(report.rows_fused for report in ours.reports) > 0
    return [report.captures for report in ours.reports if report.captures is not None]


@pytest.mark.parametrize(
    ("family", "experts"), [("gemma3_text", None), ("gpt_oss", "batched_mm"), ("mistral", None)]
)
@pytest.mark.parametrize("mode", ["off", "full", "piecewise", "auto"])
def test_tokens_are_those_of_transformers_in_every_mode(family, experts, mode):
    captured = run(family, mode, experts)
    assert (sum(captures.replays for captures in captured) > 0) == (mode != "off")
    full = sum(captures.full_replays for captures in captured)
    direct = sum(captures.direct_replays for captures in captured)
    assert (full > 0) == (mode in ("full", "auto"))
    assert direct > 0 if mode == "piecewise" else direct == 0 or mode == "auto"


def test_experts_that_read_sizes_on_the_host_are_skipped_by_name():
    """transformers' grouped experts of float32 read their offsets on the host, in every forward."""
    with pytest.warns(UserWarning, match="CAPTURE_SKIPPED.*cannot be captured as a whole"):
        captured = run("gpt_oss", "full", "grouped_mm")
    assert sum(captures.replays for captures in captured) == 0
    skips = [skip.message for captures in captured for skip in captures.skipped]
    assert any("runs uncaptured" in skip for skip in skips)
    assert not any("is captured in pieces" in skip for skip in skips)


# Others stand in for parts of these.
ALTERED = (
    "deepseek_v4: compressed layers",
    "llama4_text: temperature tuning",
    "mistral: dynamic RoPE",
    "phi3: longrope",
    "step3p7: experts",
)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(
            family,
            mode,
            marks=() if family in ALTERED and mode == "auto" else pytest.mark.slow,
        )
        for family in families.EVERY
        for mode in ("auto", "piecewise")
    ],
)
def test_tokens_of_every_family_are_its_own(family, mode):
    torch._dynamo.reset()
    model = families.build(family).cuda()
    ours = HybridGenerator(
        model, max_tokens=300, max_requests=3, options={"cudagraphs": mode, "strict": False}
    )
    for prompt, tokens in zip(PROMPTS, ours.generate(PROMPTS, 24), strict=True):
        # With dynamic RoPE a model keeps the longest length that it has met, and keys stay as they
        # were made; others are asked without a cache (see tests/models/runs.py).
        fresh = copy.deepcopy(model)
        ids = torch.tensor([prompt], device="cuda")
        want = fresh.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            use_cache="dynamic" in family,
        )
        assert tokens == want[0, len(prompt) :].tolist()
    assert [report.translation_nodes for report in ours.reports] == [1]


def test_decode_runs_in_buckets_that_are_captured_ahead():
    torch._dynamo.reset()
    model = families.build("gemma3_text", head_dim=32).cuda()
    ours = HybridGenerator(model, max_tokens=300, max_requests=4)
    assert isinstance(ours.forward, BucketRunner) and ours.forward.capture_sizes == (2, 4)
    assert ours.generate(PROMPTS, 24) == [alone(model, prompt, 24) for prompt in PROMPTS]
    # The smaller bucket finds room in the memory of the larger one.
    assert sum(use.graph_bytes for use in ours.forward.buckets) > 0
    (report,) = ours.reports
    assert {"2 tokens", "4 tokens"} <= set(report.captures.recorded)
    assert sum(report.captures.full_replays for report in ours.reports) > 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_decoding_waits_for_nothing_but_tokens_that_the_device_is_past(mode, options):
    """Requests stop unforeseen and others take their slots, while the next forward is queued."""
    torch._dynamo.reset()
    model = families.build("gemma3_text", head_dim=32).cuda()
    sizes = {"max_tokens": 300, "max_requests": 2, "options": {"cudagraphs": mode}}
    apart = HybridGenerator(model, **sizes, overlap=False)
    free = apart.generate(PROMPTS, 24, **options)
    stop = {free[0][4], free[1][9], free[3][2]}
    want = apart.generate(PROMPTS, 24, stop=stop, **options)
    assert sum(len(tokens) < 24 for tokens in want) >= 3
    ours = HybridGenerator(model, **sizes)
    # This compiles and captures, too.
    assert ours.generate(PROMPTS, 24, stop=stop, **options) == want
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert ours.generate(PROMPTS, 24, stop=stop, **options) == want
        assert ours.generate(PROMPTS, 24, **options) == free
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-44, 1.0, 1e300])
def test_what_a_gpu_draws_is_what_the_host_draws(temperature, top_p):
    """A division is a product with the reciprocal there, and no sum of floats deterministic."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=random).bfloat16()
    logits[:, ::7] = -torch.inf
    numbers = torch.rand(40, generator=random, dtype=torch.float64)
    sampling = Sampling(temperature, top_p)
    wanted = sampling.choose(logits, numbers)
    torch.use_deterministic_algorithms(True)
    try:
        together = sampling.choose(logits.cuda(), numbers.cuda())
        alone = [
            sampling.choose(logits[i : i + 1].cuda(), numbers[i : i + 1].cuda()) for i in range(40)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(together, torch.cat(alone))
    assert (together.cpu() == wanted).sum() >= 39  # near a border rounding decides
    assert wanted.min() >= 0
