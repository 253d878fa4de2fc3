"""`HybridGenerator`: batching, queueing, sampling, stopping. Compiled in test_families."""

import collections

import numpy as np
import pytest
import torch

from swa_compile.hf import HybridGenerator, ahead
from swa_compile.kv import check

from . import families, runs


@pytest.fixture(scope="module")
def model():
    return families.build("gemma3_text")


def generator(model, **sizes):
    defaults = {"max_tokens": 200, "max_requests": 3, "backend": None}
    return HybridGenerator(model, **{**defaults, **sizes})


def hugging(model, prompt, count, **settings):
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, **settings)
    return out[0, len(prompt) :].tolist()


MANY = runs.prompts((21, 13, 3, 9, 1, 17, 8))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("requests", [1, 3, 7])
def test_requests_that_wait_join_and_leave_get_the_tokens_they_get_alone(
    model, page_size, requests
):
    ours = generator(model, max_requests=requests, max_tokens=300, page_size=page_size)
    assert ours.generate(MANY, 12) == [hugging(model, prompt, 12) for prompt in MANY]
    check(ours.pool)
    assert ours.pool.full_free == ours.pool.full_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_of_a_forward_are_read_from_the_device_together(model, monkeypatch, temperature):
    """Each read makes the host wait for a GPU."""
    ours = generator(model, max_requests=4)
    forwards, reads = [], []
    tolist = ahead.Arriving.tolist
    monkeypatch.setattr(ahead.Arriving, "tolist", lambda t: reads.append(t) or tolist(t))

    class Logits(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            assert name not in ("cpu", "to", "item", "tolist", "numpy"), name
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    def watched(batch, forward=ours.forward):
        forwards.append(len(batch.seq_lens))
        return forward(batch).as_subclass(Logits)

    ours.forward = watched
    ours.generate(MANY[2:6], 12, temperature=temperature)
    assert max(forwards) == 4
    assert 0 < len(reads) <= len(forwards)


@pytest.mark.parametrize("backend", ["eager", "swa_eager"])
def test_a_pool_too_small_for_all_makes_the_others_wait(model, backend):
    ours = generator(model, max_tokens=70, max_requests=7, swa_tokens=40, backend=backend)
    together = []

    def watched(batch, forward=ours.forward):
        together.append(len(batch.seq_lens))
        runs.poison(ours.pool)
        return forward(batch)

    ours.forward = watched
    assert ours.generate(MANY, 12) == [hugging(model, prompt, 12) for prompt in MANY]
    assert 1 < max(together) < 7


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_of_any_size_give_the_same_logits(model, chunk):
    logits = generator(model, chunk=chunk).prefill(MANY)
    want = torch.stack([runs.eager_logits(model, prompt)[-1] for prompt in MANY])
    assert logits.shape == (7, families.VOCAB)
    assert float((logits - want).abs().max() / want.abs().max()) < 1e-4


def test_chunked_layers_keep_their_chunk_and_no_more():
    """Llama 4: what an earlier chunk holds is evicted as soon as the next begins."""
    model = families.build("llama4_text")
    ours = generator(model, page_size=4)
    run = runs.Decoding(ours.forward, ours.pool, runs.prompts(), width=ours.width).run(30)
    assert runs.logit_error(model, run) < 1e-4
    for row, sequence in zip(run.rows, run.sequences, strict=True):
        sent = len(sequence) - 1
        slots = ours.pool.full_to_swa_index_mapping[ours.pool.req_to_token[row, :sent].long()]
        # The last batch evicted what its query, at position sent - 1, no longer saw.
        assert (slots > 0).tolist() == [at >= (sent - 1) // 8 * 8 for at in range(sent)]


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(model):
    ours = generator(model, max_tokens=40)

    def ran(batch):
        raise AssertionError("the model ran")

    ours.forward = ran
    with pytest.raises(ValueError, match=r"prompt 1 \(35 tokens, 10 new\) takes 44 slots.*40"):
        ours.generate([[5], [5] * 35], 10)
    tight = generator(model, swa_tokens=4)
    with pytest.raises(ValueError, match=r"prompt 0 .* SWA slots; the pool has 4"):
        tight.generate([[5] * 20], 2)
    assert len(tight.generate([[5]], 3)[0]) == 3  # what is short fits


@pytest.mark.parametrize(
    ("prompts", "count", "error", "words"),
    [
        ([[1], []], 3, ValueError, "prompt 1 is empty"),
        ([[1, 96]], 3, ValueError, "prompt 0 holds the id 96; the vocabulary has 96"),
        ([[-1]], 3, ValueError, "prompt 0 holds the id -1"),
        ([[1.5]], 3, TypeError, "prompt 0 holds 1.5"),
        ([[1]], 0, ValueError, "max_new_tokens is at least 1; got 0"),
        ([[1]], 1.0, TypeError, "max_new_tokens is an int"),
        ([[1]], True, TypeError, "max_new_tokens is an int"),
        ([1, 2, 3], 3, TypeError, "prompt 0 is a collection of token ids; got 1"),
        (["text"], 3, TypeError, "prompt 0 is a collection of token ids; got 'text'"),
        ([[True]], 3, TypeError, "prompt 0 holds True, which is no token id"),
    ],
)
def test_wrong_prompts_are_refused(model, prompts, count, error, words):
    with pytest.raises(error, match=words):
        generator(model).generate(prompts, count)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is a number of at least 0; got -1.0"),
        ({"top_p": 0.0}, "top_p is above 0 and at most 1; got 0.0"),
        ({"temperature": float("nan")}, "temperature is a number of at least 0; got nan"),
        ({"temperature": "hot"}, "temperature is a number; got 'hot'"),
        ({"temperature": True}, "temperature is a number; got True"),
        ({"top_p": None}, "top_p is a number; got None"),
        ({"seed": 1.5}, "seed is an int; got 1.5"),
        ({"seed": None}, "seed is an int; got None"),
        ({"stop": 5}, "stop is a collection of token ids; got 5"),
        ({"stop": "abc"}, "stop is a collection of token ids; got 'abc'"),
        ({"stop": [1.5]}, "stop holds 1.5, which is no token id"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(model, options, words):
    ours = generator(model)
    ours.forward = None
    with pytest.raises((ValueError, TypeError), match=words):
        ours.generate([[1]], 3, **options)


@pytest.mark.parametrize("kind", [list, set, np.array, torch.tensor, iter])
def test_stop_is_any_collection_of_integers(model, kind):
    tokens = hugging(model, MANY[0], 5)
    stop = kind([tokens[2], 95])
    want = tokens[: tokens.index(tokens[2]) + 1]
    options = {"temperature": np.float64(0), "seed": np.int64(3)}
    assert generator(model).generate([MANY[0]], np.int64(5), stop=stop, **options) == [want]


def test_no_prompts_give_nothing(model):
    assert generator(model).generate([], 3) == []
    assert generator(model).prefill([]).shape == (0, families.VOCAB)


def test_numpy_ids_are_ids(model):
    prompt = np.array(MANY[1])
    assert generator(model).generate([prompt], 3) == [hugging(model, MANY[1], 3)]


def test_generation_ends_at_the_models_eos_and_at_a_stop_token(model):
    free = generator(model).generate([MANY[0]], 20)[0]
    third = free[2]
    first = free.index(third) + 1
    model.generation_config.eos_token_id = [third, 95]
    try:
        ours = generator(model).generate([MANY[0], MANY[1]], 20)
        assert ours[0] == hugging(model, MANY[0], 20) == free[:first]
    finally:
        model.generation_config.eos_token_id = None
    assert generator(model).generate([MANY[0]], 20, stop=[third]) == [free[:first]]


def test_a_seed_decides_the_tokens_whatever_runs_beside(model):
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    alone = generator(model, max_requests=1).generate(MANY, 6, **options)
    beside = generator(model, max_requests=7, max_tokens=300).generate(MANY, 6, **options)
    assert alone == beside
    other = generator(model).generate(MANY, 6, **{**options, "seed": 4})
    assert other != alone


def test_sampling_draws_by_the_logits_within_the_nucleus(model):
    """The oracle: the softmax of transformers' own logits, counted out over many draws."""
    temperature, top_p, draws = 2.0, 0.8, 1200
    chances = (runs.eager_logits(model, MANY[2])[-1] / temperature).softmax(-1).tolist()
    nucleus, total = {}, 0.0
    for token in sorted(range(len(chances)), key=lambda i: -chances[i]):
        if total >= top_p:
            break
        nucleus[token] = chances[token]
        total += chances[token]
    ours = generator(model, max_requests=64, max_tokens=200)
    drawn = ours.generate([MANY[2]] * draws, 1, temperature=temperature, top_p=top_p)
    counts = collections.Counter(tokens[0] for tokens in drawn)
    assert set(counts) <= set(nucleus) and len(nucleus) < families.VOCAB / 1.2
    for token, chance in nucleus.items():
        expected = draws * chance / total
        assert abs(counts[token] - expected) < 5 * expected**0.5 + 5, token


def test_tokens_are_streamed_as_they_come(model):
    ours = generator(model)
    told = []
    result = ours.generate(MANY[:2], 5, on_token=told.append, progress=True)
    streamed = list(ours.stream(MANY[:2], 5))
    assert told == streamed
    for i, tokens in enumerate(result):
        mine = [token for token in streamed if token.prompt == i]
        assert [token.id for token in mine] == tokens
        assert [token.last for token in mine] == [False] * 4 + [True]
    # The shorter prompt needs fewer forwards: its first token comes ahead of the other's.
    assert streamed[0].prompt == 1


def test_a_run_that_is_left_or_fails_gives_its_slots_back(model):
    ours = generator(model)
    stream = ours.stream(MANY, 5)
    next(stream)
    with pytest.raises(RuntimeError, match="running already"):
        ours.generate([[1]], 2)
    stream.close()
    assert ours.pool.full_free == ours.pool.full_tokens

    def fails(token):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours.generate(MANY, 5, on_token=fails)
    assert ours.pool.full_free == ours.pool.full_tokens
    assert ours.generate([MANY[1]], 4) == [hugging(model, MANY[1], 4)]


def test_options_without_a_compiler_are_refused(model):
    with pytest.raises(ValueError, match="takes no options"):
        generator(model, backend="eager", options={"strict": True})


def test_more_generators_than_dynamo_recompiles_one_function_work():
    """Dynamo gives a code object up after eight compilations."""
    assert torch._dynamo.config.recompile_limit == 8
    model = families.build("mistral", num_hidden_layers=1)
    want = hugging(model, MANY[2], 2)
    for extra in range(9):
        ours = generator(model, backend="swa_eager", max_tokens=50 + extra)
        assert ours.generate([MANY[2]], 2) == [want]
        assert len(ours.reports) == 1
