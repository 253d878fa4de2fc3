"""Speculative decoding gives the target's own tokens, whatever the draft model proposes."""

import collections

import pytest
import torch

from swa_compile.hf import HybridGenerator, SpeculativeGenerator, UnsupportedModel

from . import families, runs
from .speculating import Watch, draft_for, transformers_tokens

MANY = runs.prompts((21, 13, 3, 9, 1, 17, 8))
LIMIT = 14


@pytest.fixture(scope="module")
def model():
    return families.build("mistral")  # its tokens vary, while Gemma's repeat themselves


def generator(model, draft, **sizes):
    defaults = {"max_tokens": 200, "max_requests": 3, "backend": None, "draft_tokens": 4}
    return SpeculativeGenerator(model, draft, **{**defaults, **sizes})


def compare(ours, prompts=MANY, limit=LIMIT, **settings):
    """Tokens equal, every live row of both pools right in every round, nothing kept at the end."""
    watch = Watch(ours)
    results = ours.generate(prompts, limit)
    model = ours.bridge.model
    want = [transformers_tokens(model, prompt, limit, **settings) for prompt in prompts]
    assert results == want
    assert {name for _, name, *_ in watch.rows} == {"target", "draft"}
    assert watch.error(prompts, results) < 1e-4
    for pool in (ours.pool, ours.draft.pool):
        assert pool.full_free == pool.full_tokens and pool.swa_free == pool.swa_tokens
    return watch


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["small", "noisy", "itself", "adversary"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
def test_tokens_and_cache_rows_are_those_without_a_draft(family, kind, page_size):
    target = families.build(family)
    ours = generator(target, draft_for(target, kind), page_size=page_size, max_tokens=240)
    watch = compare(ours)
    assert watch.evicted > 0
    rate = ours.acceptance.rate
    assert ours.acceptance.drafted > 0
    if kind == "noisy":
        assert 0 < rate < 1
    elif kind != "small":
        assert rate == (kind == "itself")


@pytest.mark.parametrize(("window", "draft_tokens"), [(1, 3), (2, 5), (3, 3), (8, 12)])
@pytest.mark.parametrize("kind", ["noisy", "itself", "adversary"])
def test_windows_shorter_than_the_draft_lose_nothing_to_a_rollback(window, draft_tokens, kind):
    target = families.build("gpt_oss", sliding_window=window)
    ours = generator(target, draft_for(target, kind), draft_tokens=draft_tokens)
    assert ours.pool.window == ours.draft.pool.window == window
    # transformers' cache of a window of 1 is none: it keeps every key (5.17).
    assert compare(ours, use_cache=window > 1).evicted > 0


@pytest.mark.parametrize("family", ["llama4_text", "gemma3n_text", "mimo_v2_flash", "deepseek_v4"])
@pytest.mark.parametrize("kind", ["noisy", "itself"])
def test_chunks_shared_caches_and_geometries_of_their_own(family, kind):
    """Drafts end at the end of a chunk, where a layer is chunked."""
    target = families.build(family)
    compare(generator(target, draft_for(target, kind), page_size=4), MANY[:4])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(temperature):
    target = families.build("mistral")
    draft = draft_for(target, "small")
    with torch.no_grad():
        target.lm_head.weight[7] = torch.nan
    ours = generator(target, draft)
    with pytest.raises(ValueError, match="after the tokens of prompt 1 hold NaN"):
        ours.generate(MANY[:2], 5, temperature=temperature)
    for pool in (ours.pool, ours.draft.pool):
        assert pool.full_free == pool.full_tokens and pool.swa_free == pool.swa_tokens


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompts_go_in_by_chunks_of_any_size_beside_the_drafts_of_others(model, chunk):
    ours = generator(model, draft_for(model, "noisy"), chunk=chunk)
    together = collections.Counter()
    propose = ours.draft.propose

    def watched(turns):
        decoding = sum(turn.drafts > 0 for turn in turns)
        together[decoding > 0, decoding < len(turns)] += 1
        return propose(turns)

    ours.draft.propose = watched
    compare(ours)
    assert together[True, True] > 0  # prompts beside drafts


def test_a_draft_of_another_family_with_another_window_and_pages_of_its_own(model):
    draft = families.build("gpt_oss", sliding_window=3)
    ours = generator(model, draft)
    assert (ours.pool.window, ours.draft.pool.window) == (8, 3)
    compare(ours)


def test_pools_too_small_for_all_make_the_others_wait(model):
    ours = generator(model, draft_for(model, "noisy"), max_tokens=70, max_requests=7)
    watch = compare(ours)
    alone = sum(-(-len(prompt) // 8) + 1 for prompt in MANY)
    assert watch.forwards > alone / 2


def test_slots_of_drafts_count_when_a_request_is_let_in():
    """A window of 2 and 5 drafts take up to 8 SWA slots of the 20; 3 would do without drafts."""
    target = families.build("gpt_oss", sliding_window=2)
    ours = generator(target, target, draft_tokens=5, swa_tokens=20, max_requests=7)
    together, propose = [], ours.draft.propose

    def watched(turns):
        together.append(len(turns))
        return propose(turns)

    ours.draft.propose = watched
    compare(ours, [[5 + i] for i in range(7)])
    assert max(together) == 2


@pytest.mark.parametrize("limit", range(1, 12))
def test_the_limit_is_reached_in_the_middle_of_accepted_drafts(model, limit):
    prompts = MANY[1:3]
    ours = generator(model, model)
    want = [transformers_tokens(model, prompt, limit) for prompt in prompts]
    assert ours.generate(prompts, limit) == want
    assert ours.pool.full_free == ours.pool.full_tokens


@pytest.mark.parametrize("place", range(7))
def test_a_stop_token_in_the_middle_of_accepted_drafts_ends_the_request(model, place):
    free = transformers_tokens(model, MANY[3], 20)
    stop = free[place]
    assert free.index(stop) == place  # the first by the prompt, then 1 to 5 by one round
    other = transformers_tokens(model, MANY[1], 20)
    stopped = other[: other.index(stop) + 1] if stop in other else other
    ours = generator(model, model)
    prompts = [MANY[3], MANY[1]]
    assert ours.generate(prompts, 20, stop=[stop]) == [free[: place + 1], stopped]
    assert ours.pool.full_free == ours.pool.full_tokens
    model.generation_config.eos_token_id = stop
    try:
        assert ours.generate(prompts[:1], 20) == [free[: place + 1]]
    finally:
        model.generation_config.eos_token_id = None


def test_what_is_accepted_is_counted(model):
    """13 prompt tokens in two chunks, one token by them, then 5 + 5 + 2 by 4 + 4 + 1 drafts."""
    ours = generator(model, model)
    watch = Watch(ours)
    ours.generate([MANY[1]], 13)
    counts = ours.acceptance
    assert (counts.verifications, counts.drafted, counts.accepted) == (3, 9, 9)
    assert (counts.rate, counts.mean_length) == (1.0, 4.0)
    assert watch.forwards == 2 + 3
    wrong = generator(model, draft_for(model, "adversary"))
    wrong.generate([MANY[1]], 13)
    # A token a round; the drafts get fewer when the limit is near, and the last needs none.
    counts = wrong.acceptance
    assert (counts.verifications, counts.drafted, counts.accepted) == (11, 8 * 4 + 3 + 2 + 1, 0)
    assert (counts.rate, counts.mean_length) == (0.0, 1.0)


@pytest.mark.parametrize("kind", ["noisy", "itself", "adversary"])
def test_a_seed_draws_the_tokens_that_it_draws_without_a_draft(model, kind):
    options = {"temperature": 1.5, "top_p": 0.9, "seed": 3}
    alone = HybridGenerator(model, max_tokens=200, max_requests=3, backend=None)
    want = alone.generate(MANY, LIMIT, **options)
    ours = generator(model, draft_for(model, kind))
    assert ours.generate(MANY, LIMIT, **options) == want
    greedy = [transformers_tokens(model, prompt, LIMIT) for prompt in MANY]
    assert want != greedy
    if kind == "itself":
        assert 0 < ours.acceptance.rate < 1
    assert ours.generate(MANY, LIMIT, **{**options, "seed": 4}) != want


def test_draws_of_several_tokens_have_the_targets_distribution(model):
    """The oracle: the chain of transformers' own softmaxes, counted out over many draws."""
    temperature, top_p, draws, prompt = 0.9, 0.6, 1000, MANY[2]

    def nucleus(tokens):
        chances = (runs.eager_logits(model, tokens)[-1] / temperature).softmax(-1).tolist()
        kept, total = {}, 0.0
        for token in sorted(range(len(chances)), key=lambda i: -chances[i]):
            if total >= top_p:
                break
            kept[token] = chances[token]
            total += chances[token]
        return {token: chance / total for token, chance in kept.items()}

    chances = {(): 1.0}
    for _ in range(3):
        chances = {
            (*before, token): chance * own
            for before, chance in chances.items()
            for token, own in nucleus([*prompt, *before]).items()
        }
    assert len(chances) > 10
    ours = generator(
        model, draft_for(model, "noisy"), draft_tokens=2, max_requests=100, max_tokens=1000
    )
    drawn = ours.generate([prompt] * draws, 3, temperature=temperature, top_p=top_p)
    assert 0 < ours.acceptance.rate < 1
    counts = collections.Counter(map(tuple, drawn))
    assert set(counts) <= set(chances)
    for tokens, chance in chances.items():
        expected = draws * chance
        assert abs(counts[tokens] - expected) < 5 * expected**0.5 + 5, tokens


def test_a_target_alone_is_what_prefill_and_a_second_run_see(model):
    ours = generator(model, draft_for(model, "noisy"))
    logits = ours.prefill(MANY)
    want = torch.stack([runs.eager_logits(model, prompt)[-1] for prompt in MANY])
    assert float((logits - want).abs().max() / want.abs().max()) < 1e-4
    first = ours.generate(MANY[:2], 6)
    stream = ours.stream(MANY, 6)
    next(stream)
    with pytest.raises(RuntimeError, match="running already"):
        ours.generate([[1]], 2)
    stream.close()
    for pool in (ours.pool, ours.draft.pool):
        assert pool.full_free == pool.full_tokens
    assert ours.generate(MANY[:2], 6) == first
    assert ours.generate([], 3) == []


def test_tokens_are_streamed_in_order_and_the_last_is_marked(model):
    told = []
    ours = generator(model, model)
    results = ours.generate(MANY[:3], 7, on_token=told.append, progress=True)
    for i, tokens in enumerate(results):
        mine = [token for token in told if token.prompt == i]
        assert [token.id for token in mine] == tokens
        assert [token.last for token in mine] == [False] * 6 + [True]


@pytest.mark.parametrize("size", [80, 90, 100, 224])
def test_embeddings_of_the_draft_padded_to_another_size_cost_drafts_and_nothing_else(model, size):
    """Ids that only one of the two models has are neither drafted nor handed to the draft."""
    draft = families.build("mistral", vocab_size=size)
    seen = []
    inner = draft.get_input_embeddings()
    inner.register_forward_pre_hook(lambda module, args: seen.append(int(args[0].max())))
    prompts = [[95, 91, 5], [3, 89, 93, 94]]
    ours = generator(model, draft)
    watch = Watch(ours)
    assert ours.generate(prompts, LIMIT) == [
        transformers_tokens(model, prompt, LIMIT) for prompt in prompts
    ]
    assert max(seen) < min(size, 96)
    assert watch.forwards > 0


@pytest.mark.parametrize(
    ("draft", "options", "error", "words"),
    [
        (
            {"vocab_size": 225},
            {},
            ValueError,
            "a vocabulary of 225 tokens and the target one",
        ),
        ({}, {"draft_tokens": 0}, ValueError, "draft_tokens is at least 1; got 0"),
        ({}, {"draft_tokens": True}, TypeError, "draft_tokens is an int; got True"),
        ({}, {"draft_tokens": 2.0}, TypeError, "draft_tokens is an int; got 2.0"),
    ],
)
def test_what_does_not_fit_together_is_refused(model, draft, options, error, words):
    with pytest.raises(error, match=words):
        generator(model, families.build("mistral", **draft), **options)


def test_a_draft_that_no_pool_can_hold_is_refused_as_a_draft(model):
    words = r"as a draft model: doge \(DogeForCausalLM\): its layers add a learned mask"
    with pytest.raises(UnsupportedModel, match=words):
        generator(model, families.build("doge"))
    with pytest.raises(UnsupportedModel, match=r"^doge"):
        generator(families.build("doge"), model)
    draft = families.build("gemma3_text").train()
    with pytest.raises(UnsupportedModel, match=r"as a draft model: .* in training mode"):
        generator(model, draft)
    with pytest.raises(TypeError, match="a causal language model of transformers is wanted"):
        generator(model, torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("phi3: longrope", "RoPE goes by the length of a request"),
        ("deepseek_v4: compressed layers", "compressed layers make one entry of several tokens"),
    ],
)
def test_what_a_rejected_token_would_leave_behind_is_refused(model, family, words):
    other = families.build(family)
    with pytest.raises(UnsupportedModel, match=words):
        generator(other, other)
    if other.config.vocab_size == model.config.vocab_size:
        with pytest.raises(UnsupportedModel, match=f"as a draft model: .*{words}"):
            generator(model, other)


def test_a_draft_on_another_device_is_refused(model, monkeypatch):
    draft = families.build("gemma3_text")
    monkeypatch.setattr(type(draft), "device", property(lambda self: torch.device("cuda", 1)))
    with pytest.raises(ValueError, match=r"draft model is on cuda:1 and the target on cpu"):
        generator(model, draft)


def test_a_request_that_does_not_fit_into_the_drafts_pool_is_refused_before_anything_runs(model):
    ours = generator(model, draft_for(model, "small"), max_tokens=40)

    def ran(*arguments):
        raise AssertionError("a model ran")

    ours.draft.propose = ours.verify = ran
    with pytest.raises(ValueError, match=r"takes 44 slots; the pool has 40"):
        ours.generate([[5], [5] * 35], 10)
    tight = generator(model, draft_for(model, "small"), swa_tokens=4)
    with pytest.raises(ValueError, match=r"SWA slots; the pool has 4"):
        tight.generate([[5]], 10)
