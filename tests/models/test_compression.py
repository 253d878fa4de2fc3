"""DeepSeek V4's compressed layers: entries, the choice among them, and what they take."""

import pytest
import torch

from swa_compile.hf import Bridge, HybridGenerator, UnsupportedModel
from swa_compile.hf.compressed_caches import LayerCaches
from swa_compile.hf.paged_scorer import PagedScorer

from . import families, runs

VARIANT = "deepseek_v4: compressed layers"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


@pytest.fixture(scope="module")
def model():
    return families.build(VARIANT)


def generator(model, **sizes):
    return HybridGenerator(
        model, **{"max_tokens": 256, "max_requests": 3, "backend": None, "chunk": 8, **sizes}
    )


def error_of(model, steps=12, **sizes):
    ours = generator(model, **sizes)
    run = runs.Decoding(ours.forward, ours.pool, runs.prompts(), width=ours.width).run(steps)
    return runs.logit_error(model, run), runs.cache_error(model, run)[0]


@pytest.mark.parametrize("page_size", [4, 6, 8])
def test_pages_of_any_size_hold_entries(model, page_size):
    """Whole groups of 4 and 8 tokens in a page, of one kind alone, and none."""
    assert max(error_of(model, page_size=page_size)) < 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_of_any_size_make_the_same_entries(model, chunk):
    prompts = runs.prompts((21, 13, 3, 8))
    got = generator(model, chunk=chunk, max_requests=2).prefill(prompts)
    want = torch.stack([runs.eager_logits(model, prompt)[-1] for prompt in prompts])
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_requests_that_wait_for_a_full_pool_get_the_tokens_they_get_alone(model):
    ours = generator(model, max_tokens=60, max_requests=4, page_size=8)
    prompts = runs.prompts((21, 13, 3, 9, 17))
    assert ours.generate(prompts, 12) == [runs.generated(model, p, 12) for p in prompts]
    assert ours.pool.full_free == ours.pool.full_tokens


def test_another_choice_of_entries_would_be_seen(model, monkeypatch):
    choose = LayerCaches.choose
    monkeypatch.setattr(LayerCaches, "choose", lambda self, scores: choose(self, -scores))
    assert error_of(model)[0] > 1e-2


def test_an_entry_too_few_would_be_seen(model, monkeypatch):
    table = LayerCaches._table

    def shorter(self):
        rows, lengths = table(self)
        fewer = (self.batch.positions + 1 >= self.compression.ratio) & (lengths > 0)
        return rows[:, 1:], lengths - fewer.to(lengths.dtype)

    ours = generator(model, max_requests=1, chunk=8)
    prompt = runs.prompts((21,))
    monkeypatch.setattr(LayerCaches, "_table", shorter)
    got = ours.prefill(prompt)[0]
    want = runs.eager_logits(model, prompt[0])[-1]
    assert float((got - want).abs().max() / want.abs().max()) > 1e-2


def test_the_five_stores_of_a_sparse_layer_go_by_one_translation():
    """Scenarios A1 and A15 on the class itself."""
    torch._dynamo.reset()
    one = families.build(
        VARIANT, num_hidden_layers=1, layer_types=[SPARSE], mlp_layer_types=["moe"]
    )
    ours = generator(one, backend="swa_eager")
    prompts = runs.prompts()
    assert ours.generate(prompts, 12) == [runs.generated(one, p, 12) for p in prompts]
    (report,) = ours.reports
    assert (report.stores_found, report.stores_lowered) == (5, 5)
    # Three stores at the new tokens' SWA slots, and three reads through the page table.
    assert (report.translations_found, report.translation_nodes) == (6, 1)
    assert [value.uses for value in report.values] == [3, 3]
    assert report.invariants_hoisted > 0


def test_the_caches_of_a_layer_are_those_of_its_kind(model):
    bridge = Bridge(model)
    sparse, heavy, sliding, _ = (layer.compression for layer in bridge.layers)
    assert sliding is None
    assert (sparse.ratio, sparse.overlap, sparse.chosen) == (4, True, 3)
    assert (heavy.ratio, heavy.overlap, heavy.indexer) == (8, False, None)
    kinds = [(s.kind, s.k_dim, s.window, s.ratio, s.shared) for s in bridge.specs]
    assert kinds[:4] == [
        ("swa", 16, 8, 4, True),
        ("swa", 16, 8, 8, True),
        ("swa", 16, 8, None, False),
        ("swa", 16, 8, 4, True),
    ]
    # Keys and gates that wait for their group (with the group before it where they overlap),
    # those of the indexer, and its entries; then the heavy layer's, then the last layer's.
    of_sparse = [("swa", 32, 8, None, False)] * 2 + [("compressed", 16, None, 4, True)]
    assert kinds[4:] == [*of_sparse, ("swa", 16, 8, None, False), *of_sparse]


def test_pages_of_whole_groups_hold_one_row_an_entry(model):
    bridge = Bridge(model)
    pool = bridge.make_pool(max_tokens=160, max_requests=2, page_size=8)
    index = bridge.layers[0].compression.indexer.entries
    assert pool.k_cache(index).shape == (168 // 4, 1, 16)
    assert pool.k_cache(1).shape[0] == pool.swa_tokens + 8 + 168 // 8
    assert pool.k_cache(1) is pool.v_cache(1)
    rows = 2 * (168 // 4) + 168 // 8 + 2 * (168 // 4)  # two sparse, one heavy, two indexers
    assert pool.nbytes()["compressed"] == rows * 16 * 4
    every = [cache(i) for i in range(len(pool.layers)) for cache in (pool.k_cache, pool.v_cache)]
    assert sum(pool.nbytes().values()) == sum({id(t): t.nbytes for t in every}.values())


def test_the_model_has_its_scorers_back_after_a_forward(model):
    generator(model).generate([[3, 4, 5, 6, 7]], 2)
    assert not any(isinstance(part, PagedScorer) for part in model.modules())


def test_a_compressor_of_another_form_is_refused_by_name():
    model = families.build(VARIANT)
    attention = model.model.layers[1].self_attn

    class Other(torch.nn.Module):
        def __init__(self, original):
            super().__init__()
            self.original = original

        def forward(self, *arguments):
            return self.original(*arguments)

    attention.compressor = Other(attention.compressor)
    with pytest.raises(UnsupportedModel, match=r"layer 1 \(DeepseekV4Attention\) compresses keys"):
        Bridge(model)


def test_a_compressed_layer_without_a_compressor_is_refused_by_name():
    model = families.build("deepseek_v4")
    model.config.layer_types = ["sliding_attention", HEAVY, SPARSE, "sliding_attention"]
    with pytest.raises(UnsupportedModel, match=f"layer 1 is '{HEAVY}', and .* has no compressor"):
        Bridge(model)
