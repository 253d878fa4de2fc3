"""Real Inductor on a telling family, and low precision on dense ones."""

import pytest
import torch

from . import families, runs
from .test_families import compare, fresh


@pytest.mark.inductor
@pytest.mark.slow
def test_a_family_with_sinks_and_experts_compiled_by_inductor_is_right():
    compare("gpt_oss", "swa", lambda name, value: None)


@pytest.mark.inductor
def test_inductor_copies_no_cache():
    generator = fresh(families.build("mistral"), "swa", options={"strict": True})
    generator.generate(runs.prompts(), 3)
    assert [report.cache_copies for report in generator.reports] == [0]


@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        ("gpt_oss", 16),
        pytest.param("gemma4_text", 4, marks=pytest.mark.slow),
        ("llama4_text", 4),
    ],
)
def test_pages_of_several_tokens_change_nothing(family, page_size):
    compare(family, "swa_eager", lambda name, value: None, page_size=page_size)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "olmo3", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_eager_bfloat16_is(family):
    exact = families.build(family)
    model = families.build(family, torch.bfloat16)
    exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    generator = fresh(model, "swa_eager")
    assert generator.pool.k_cache(0).dtype is torch.bfloat16
    run = runs.Decoding(generator.forward, generator.pool, runs.prompts(), width=generator.width)
    run.run(runs.STEPS)
    ours, theirs = [], []
    for sequence, start, rows in zip(run.sequences, run.starts, run.logits, strict=True):
        want = runs.eager_logits(exact, sequence[:-1])[start - 1 :]
        low = runs.eager_logits(model, sequence[:-1])[start - 1 :]
        ours.append((torch.stack(rows).float() - want).abs())
        theirs.append((low.float() - want).abs())
    mean = [torch.cat(errors).mean() for errors in (ours, theirs)]
    assert 0 < mean[0] < 1.3 * mean[1]
