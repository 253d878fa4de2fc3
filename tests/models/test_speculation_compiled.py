"""The graphs of speculative decoding: several draft steps and one translation in each."""

import dataclasses

import pytest
import torch

from swa_compile import collect
from swa_compile.hf import SpeculativeGenerator
from swa_compile.hf.bridge import Bridge, Forward
from swa_compile.kv import HybridKVPool

from . import families, runs
from .speculating import Watch, draft_for, transformers_tokens

MANY = runs.prompts((21, 13, 3, 9, 1, 17, 8))
LIMIT = 14


TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def compiled(model, draft, backend="swa_eager", **sizes):
    torch._dynamo.reset()
    defaults = {"max_tokens": 200, "max_requests": 3, "draft_tokens": 3}
    return SpeculativeGenerator(model, draft, backend=backend, **{**defaults, **sizes})


def compare(ours, prompts=MANY, limit=LIMIT):
    """Tokens and live rows of both pools; the sizes (N, B) of the target's forwards."""
    watch, sizes = Watch(ours), set()
    verify = ours.verify

    def watched(turns, drafts):
        sizes.add((sum(len(turn.known) + turn.drafts for turn in turns), len(turns)))
        return verify(turns, drafts)

    ours.verify = watched
    results = ours.generate(prompts, limit)
    model = ours.bridge.model
    assert results == [transformers_tokens(model, prompt, limit) for prompt in prompts]
    assert watch.error(prompts, results) < 1e-4
    assert len(sizes) >= 6 and {requests for _, requests in sizes} == {1, 2, 3}


def found_and_nodes(reports):
    assert all(report.translations_left == 0 and not report.refused for report in reports)
    return [(report.translations_found, report.translation_nodes) for report in reports]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gemma3_text", "noisy"),
        pytest.param("gpt_oss", "small", marks=pytest.mark.slow),
        ("mistral", "itself"),
    ],
)
def test_all_draft_steps_share_one_translation_and_one_compilation(family, kind):
    """Scenarios A8 and A9: draft steps, and prompts that go into the draft's cache alone."""
    target = families.build(family, **({"num_hidden_layers": 2} if family == "mistral" else TWO))
    ours = compiled(target, draft_for(target, kind))
    compare(ours)

    def per_forward(bridge):
        sliding = sum(layer.spec.kind == "swa" for layer in bridge.layers)
        return 2 * sliding, len(bridge.layers)  # a store and a table each

    steps = ours.draft.tokens
    calls, stores = per_forward(ours.bridge)
    assert found_and_nodes(ours.reports) == [(calls, 1)]
    assert [report.stores_lowered for report in ours.reports] == [stores]
    # Prompts alone, and then all steps.
    calls, stores = per_forward(ours.draft.bridge)
    assert found_and_nodes(ours.draft.reports) == [(calls, 1), (steps * calls, 1)]
    assert [r.stores_lowered for r in ours.draft.reports] == [stores, steps * stores]
    # Of the steps: the first one's slots, all later ones' slots, and the one page table.
    lead, many = ours.draft.reports
    assert (len(lead.values), len(many.values)) == (2, 3)


@pytest.mark.parametrize(
    "steps",
    [2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 6))],
)
def test_the_number_of_steps_does_not_change_the_number_of_nodes(steps):
    target = families.build("mistral", num_hidden_layers=2)
    ours = compiled(target, draft_for(target, "noisy"), draft_tokens=steps)
    compare(ours)
    assert found_and_nodes(ours.reports) == [(4, 1)]
    assert found_and_nodes(ours.draft.reports) == [(4, 1), (steps * 4, 1)]
    assert len(ours.draft.reports[1].values) == (2 if steps == 1 else 3)


def test_a_draft_without_sliding_layers_has_nothing_to_translate():
    """Scenario A12: a draft with a full pool of its own has no mapping."""
    target = families.build("mistral", num_hidden_layers=2)
    draft = families.build("qwen3", num_hidden_layers=1, use_sliding_window=False)
    ours = compiled(target, draft)
    assert ours.draft.pool.window is None and ours.draft.pool.swa_tokens == 0
    compare(ours)
    assert found_and_nodes(ours.reports) == [(4, 1)]
    assert found_and_nodes(ours.draft.reports) == [(0, 0), (0, 0)]


@torch.no_grad()
def test_a_pool_swapped_between_calls_is_the_one_that_is_read_and_written():
    """Scenario A12: pool and mapping are operands of the compiled forward, not constants."""
    torch._dynamo.reset()
    model = families.build("gemma3_text", **TWO)
    bridge = Bridge(model)
    pools = [bridge.make_pool(max_tokens=60, max_requests=2) for _ in range(2)]
    # Other slots in the second pool, so that a mapping taken from the first would be wrong.
    pools[1].batch({pools[1].open(): [1] * 7})
    forward, prompts = Forward(bridge, pools[0], "swa_eager"), [MANY[1], MANY[5]]
    rows = [pool.open() for pool in pools]
    for at in range(0, 13, 3):
        for pool, row, prompt in zip(pools, rows, prompts, strict=True):
            runs.poison(pool)
            forward.pool = pool
            got = forward(pool.batch({row: prompt[at : at + 3]}, width=60))[0]
            want = runs.eager_logits(model, prompt[: at + 3])[-1]
            assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@torch.no_grad()
def test_small_models_over_one_mapping_have_one_translation_each():
    """Scenario A11: several small models whose caches lie in one pool, slot by slot."""
    torch._dynamo.reset()
    models = [
        families.build("mistral", num_hidden_layers=1),
        families.build("gemma3_text", **TWO),
    ]
    bridges = [Bridge(model) for model in models]
    pool = HybridKVPool([s for b in bridges for s in b.specs], max_tokens=60, max_requests=2)
    forwards, before = [], 0
    for bridge in bridges:
        bridge.layers = tuple(
            dataclasses.replace(layer, cache=layer.cache + before) for layer in bridge.layers
        )
        before += len(bridge.specs)
        forwards.append(Forward(bridge, pool, "swa_eager"))
    rows, prompts = [pool.open(), pool.open()], [MANY[0][:15], MANY[1]]
    with collect() as reports:
        for at in range(13):
            runs.poison(pool)
            pieces = [(row, p[at : at + 1]) for row, p in zip(rows, prompts, strict=True)]
            batch = pool.batch(pieces, width=60)
            for model, forward in zip(models, forwards, strict=True):
                got = forward(batch)
                for logits, prompt in zip(got, prompts, strict=True):
                    want = runs.eager_logits(model, prompt[: at + 1])[-1]
                    assert float((logits - want).abs().max() / want.abs().max()) < 1e-4
    sliding = [sum(x.spec.kind == "swa" for x in bridge.layers) for bridge in bridges]
    assert found_and_nodes(reports) == [(2 * n, 1) for n in sliding]


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_copies_no_cache_and_gives_the_same_tokens():
    target = families.build("gemma3_text", **TWO)
    ours = compiled(target, draft_for(target, "noisy"), "swa", options={"strict": True})
    compare(ours)
    assert 0 < ours.acceptance.rate < 1
    every = [*ours.reports, *ours.draft.reports]
    assert len(every) == 3
    assert {report.cache_copies for report in every} == {0}
    assert {report.translation_nodes for report in every} == {1}
