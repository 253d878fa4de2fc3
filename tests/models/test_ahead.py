"""Tokens that are read when the next forward has begun: `HybridGenerator(overlap=True)`.

The device has no other code for it than the host, so that all is shown without a GPU. The oracle
is `generate` of transformers.
"""

import pytest
import torch

from swa_compile.hf import HybridGenerator, ahead
from swa_compile.kv import check

from . import families, runs
from .test_generator import MANY, hugging


@pytest.fixture(scope="module")
def model():
    return families.build("gemma3_text")


def generator(model, **options):
    defaults = {"max_tokens": 300, "max_requests": 3, "backend": None, "overlap": True}
    return HybridGenerator(model, **{**defaults, **options})


def watch(ours, seen):
    """Every forward goes into `seen`, and the rows of no request are NaN before it."""

    def forward(batch, forward=ours.forward):
        assert (batch.input_ids >= 0).all(), "the model was given a place holder"
        runs.poison(ours.pool)
        seen.append(batch)
        return forward(batch)

    ours.forward = forward


def caches(pool):
    return [tensor for name, tensor in pool.named_buffers() if "_cache_" in name]


def empty(pool):
    check(pool)
    return pool.full_free == pool.full_tokens and pool.swa_free == pool.swa_tokens


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("requests", [1, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_requests_that_wait_join_and_leave_get_their_own_tokens(model, page_size, requests, count):
    ours = generator(model, max_requests=requests, page_size=page_size)
    watch(ours, [])
    assert ours.generate(MANY, count) == [hugging(model, prompt, count) for prompt in MANY]
    assert empty(ours.pool)


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_prompts_in_chunks_beside_decode_steps_get_their_own_tokens(model, chunk):
    ours = generator(model, chunk=chunk, backend="swa_eager")
    watch(ours, [])
    assert ours.generate(MANY, 9) == [hugging(model, prompt, 9) for prompt in MANY]
    assert empty(ours.pool)


def test_each_forward_begins_before_the_tokens_of_the_one_before_are_read(model, monkeypatch):
    order = []
    ours = generator(model)
    forward, tolist = ours.forward, ahead.Arriving.tolist
    ours.forward = lambda batch: order.append("forward") or forward(batch)
    monkeypatch.setattr(ahead.Arriving, "tolist", lambda t: order.append("read") or tolist(t))
    tokens = ours.generate([MANY[2]], 5)
    assert order == ["forward", *["forward", "read"] * 4, "read"]
    assert tokens == [hugging(model, MANY[2], 5)]


def test_a_request_that_stops_unforeseen_takes_part_once_more_and_is_given_no_more(model):
    free = [hugging(model, prompt, 12) for prompt in MANY]
    stop = {free[0][3], free[2][5], free[4][0]}
    wanted = [
        tokens[: next((i + 1 for i, t in enumerate(tokens) if t in stop), None)] for tokens in free
    ]
    assert sum(len(tokens) < 12 for tokens in wanted) >= 3
    apart, seen = [], []
    plain = generator(model, overlap=False, max_requests=7)
    watch(plain, apart)
    ours = generator(model, max_requests=7)
    watch(ours, seen)
    assert ours.generate(MANY, 12, stop=stop) == plain.generate(MANY, 12, stop=stop) == wanted
    assert empty(ours.pool)
    rows = [sum(len(batch.seq_lens) for batch in batches) for batches in (apart, seen)]
    assert rows[1] - rows[0] == sum(len(tokens) < 12 for tokens in wanted)
    # With one request at a time the next one finds the slots of the one that stopped.
    ours = generator(model, max_requests=1)
    watch(ours, [])
    assert ours.generate(MANY, 12, stop=stop) == wanted
    assert empty(ours.pool)


def test_the_models_eos_ends_a_request(model):
    third = hugging(model, MANY[0], 5)[2]
    model.generation_config.eos_token_id = [third, 95]
    try:
        ours = generator(model).generate([MANY[0], MANY[1]], 20)
        assert ours == [hugging(model, prompt, 20) for prompt in MANY[:2]]
    finally:
        model.generation_config.eos_token_id = None


def test_caches_are_those_of_reading_at_once_row_by_row(model):
    """Where an end is foreseen slots are handed out and given back in the same order."""
    pools = []
    for overlap in (False, True):
        ours = generator(model, max_requests=7, overlap=overlap)
        for cache in caches(ours.pool):
            cache.fill_(7.0)
        ours.generate(MANY, 20)
        pools.append(ours.pool)
    assert len(caches(pools[0])) == 2 * len(model.config.layer_types)
    for one, other in zip(*map(caches, pools), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("chunk", [3, None])
def test_a_request_computed_anew_knows_a_token_that_the_host_does_not(chunk):
    """Past the border of longrope all is sent again, the newest token, still unread, with it."""
    model = families.build("phi3: longrope")
    border = HybridGenerator(model, max_tokens=64, max_requests=1).bridge.adaptation.restart_at
    prompts = runs.prompts((border - 3, border - 1, 2))
    ours = generator(model, chunk=chunk)
    watch(ours, [])
    assert ours.generate(prompts, 9) == [runs.generated(model, prompt, 9) for prompt in prompts]
    assert empty(ours.pool)


def test_a_stream_that_is_left_gives_its_slots_back(model):
    ours = generator(model)
    stream = ours.stream(MANY, 5)
    first = next(stream)
    assert first.id == hugging(model, MANY[first.prompt], 1)[0]
    stream.close()
    assert empty(ours.pool)
    assert ours.generate([MANY[1]], 4) == [hugging(model, MANY[1], 4)]


def test_tokens_come_in_the_order_of_forwards_and_tell_the_last(model):
    stop = {hugging(model, MANY[0], 3)[1]}
    streams = [
        list(generator(model, overlap=overlap).stream(MANY, 5, stop=stop))
        for overlap in (False, True)
    ]
    mine = [
        [[token for token in stream if token.prompt == i] for i in range(len(MANY))]
        for stream in streams
    ]
    assert mine[0] == mine[1]
    assert all(
        [t.last for t in tokens] == [False] * (len(tokens) - 1) + [True] for tokens in mine[1]
    )


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_what_is_sampled_does_not_depend_on_when_it_is_read(model, top_p):
    options = {"temperature": 1.0, "seed": 3, "top_p": top_p}
    plain = generator(model, overlap=False).generate(MANY, 12, **options)
    stop = {plain[0][3], plain[2][5], plain[4][0]}
    for ends in ((), stop):
        told = [
            generator(model, overlap=on).generate(MANY, 12, stop=ends, **options) for on in (0, 1)
        ]
        assert told[0] == told[1]
    assert sum(len(tokens) < 12 for tokens in told[1]) >= 3
    assert told[0] != plain


def test_on_a_cpu_nothing_overlaps_unless_asked_for(model, monkeypatch):
    order = []
    ours = HybridGenerator(model, max_tokens=300, max_requests=3, backend=None)
    forward, tolist = ours.forward, ahead.Arriving.tolist
    ours.forward = lambda batch: order.append("forward") or forward(batch)
    monkeypatch.setattr(ahead.Arriving, "tolist", lambda t: order.append("read") or tolist(t))
    ours.generate([MANY[2]], 3)
    assert order == ["forward", "read"] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_forward_that_fails_takes_no_token_of_an_earlier_one_with_it(model, overlap):
    ours = generator(model, overlap=overlap, chunk=32)
    forward, calls = ours.forward, []

    def broken(batch):
        calls.append(batch)
        if len(calls) == 4:
            raise MemoryError("the fourth")
        return forward(batch)

    ours.forward = broken
    told = [[] for _ in range(3)]
    with pytest.raises(MemoryError, match="the fourth"):
        ours.generate(MANY[2:5], 12, on_token=lambda token: told[token.prompt].append(token.id))
    assert told == [hugging(model, prompt, 3) for prompt in MANY[2:5]]
    assert empty(ours.pool)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_that_is_kept_keeps_nothing_of_the_generator(model, overlap):
    """It holds the frames that it went through, and the generators in them."""
    ours = generator(model, overlap=overlap)
    forward = ours.forward

    def fails(token):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as one:
        ours.generate(MANY, 5, on_token=fails)
    assert empty(ours.pool)
    ours.forward = lambda batch: torch.full_like(forward(batch), torch.nan)
    with pytest.raises(ValueError, match="hold NaN") as other:
        ours.generate(MANY, 5, temperature=1.0)
    assert empty(ours.pool)
    ours.forward = forward
    assert ours.generate([MANY[1]], 4) == [hugging(model, MANY[1], 4)]
    assert one.value is not other.value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_numbers_are_an_error(model, overlap, temperature):
    ours = generator(model, overlap=overlap)
    forward, calls = ours.forward, []

    def broken(batch):
        assert (batch.input_ids >= 0).all()
        calls.append(batch)
        logits = forward(batch).clone()
        if len(calls) == 4:
            logits[1] = float("nan")
        return logits

    ours.forward = broken
    with pytest.raises(ValueError, match="after the tokens of prompt 1 hold NaN"):
        ours.generate(MANY[2:5], 12, temperature=temperature)
    assert len(calls) == 4 + overlap
    assert empty(ours.pool)
