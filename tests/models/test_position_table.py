"""Models that look positions up in a table: what does not fit into it is refused, not read."""

import pytest
import torch

from swa_compile.hf import HybridGenerator, SpeculativeGenerator, UnsupportedModel

from . import families

POSITIONS = 24
# A table of learned rows, one whose rows begin at 2, and one that is indexed and not embedded.
FAMILIES = {"gpt2": {}, "opt": {"word_embed_proj_dim": 64, "ffn_dim": 64}, "ctrl": {"dff": 64}}
PROMPT = list(range(3, 18))
NEW = POSITIONS - len(PROMPT) + 1  # the last new token takes no position


def build(family, **changes):
    settings = {"max_position_embeddings": POSITIONS, "eos_token_id": None, "bos_token_id": None}
    model = families.build(family, **{**settings, **FAMILIES.get(family, {}), **changes})
    model.generation_config.eos_token_id = None
    return model


def eager(model, new):
    """Greedy tokens of the model's own forward over all tokens, one after another."""
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_fills_the_table_and_not_a_position_more(family):
    model = build(family)
    backend = None if family == "ctrl" else "swa_eager"  # CTRL sets a buffer in its forward
    generator = HybridGenerator(model, max_tokens=100, max_requests=2, backend=backend)
    assert generator.bridge.positions == generator.pool.max_context == POSITIONS
    assert generator.generate([PROMPT], NEW) == [eager(model, NEW)]
    ran = []
    generator.forward = ran.append
    with pytest.raises(ValueError, match="takes 25 slots; a request of the pool has at most 24"):
        generator.generate([[3], PROMPT], NEW + 1)
    assert not ran


def test_a_table_is_no_leave_for_more_than_the_caller_asks():
    sizes = {"max_tokens": 100, "max_requests": 2, "backend": None}
    assert HybridGenerator(build("gpt2"), **sizes, max_context=9).pool.max_context == 9
    assert HybridGenerator(build("gpt2"), **sizes, max_context=90).pool.max_context == POSITIONS


def test_a_table_shorter_than_the_self_check_is_found_ahead_of_it():
    for positions in (12, 13):
        model = build("gpt2", max_position_embeddings=positions)
        generator = HybridGenerator(model, max_tokens=100, max_requests=1, backend=None)
        assert generator.bridge.positions == positions


@pytest.mark.parametrize("backend", ["swa", "swa_eager", "aot_eager"])
def test_an_untested_family_that_is_not_traced_whole_is_refused_ahead(backend):
    """CTRL sets a buffer in its forward."""
    sizes = {"max_tokens": 100, "max_requests": 2}
    with pytest.raises(UnsupportedModel, match=r"^ctrl .*cannot be compiled whole: .*backend=None"):
        HybridGenerator(build("ctrl"), **sizes, backend=backend)
    target = build("gpt2")
    with pytest.raises(UnsupportedModel, match=r"as a draft model: ctrl .*compiled whole"):
        SpeculativeGenerator(target, build("ctrl"), **sizes, backend=backend)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt_neox"])
def test_a_model_that_computes_its_positions_has_no_such_border(family):
    model = build(family)
    generator = HybridGenerator(model, max_tokens=100, max_requests=1, backend=None)
    assert generator.bridge.positions is None and generator.pool.max_context == 100
    assert generator.generate([PROMPT], NEW + 5) == [eager(model, NEW + 5)]


def test_drafts_stop_at_the_end_of_either_table():
    model, other = build("gpt2"), build("gpt2", num_hidden_layers=1)
    sizes = {"max_tokens": 100, "max_requests": 2, "backend": None, "draft_tokens": 4}
    for draft in (model, other):  # all drafts accepted, and hardly any
        generator = SpeculativeGenerator(model, draft, **sizes)
        assert generator.generate([PROMPT], NEW) == [eager(model, NEW)]
    short = build("gpt2", max_position_embeddings=POSITIONS - 4)
    generator = SpeculativeGenerator(model, short, **sizes)
    with pytest.raises(ValueError, match=r"takes 24 slots; a request of .*draft.* at most 20"):
        generator.generate([PROMPT], NEW)
