"""The reference model over the pool: what it computes, and that the compiler keeps it."""

import itertools

import pytest
import torch

import swa_compile
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.models.greedy import greedy
from swa_compile.models.hybrid import rope

PROMPTS = [list(range(5, 40)), list(range(50, 77)), [7, 9]]
SMALL = {"layers": ("swa", "full") * 2, "d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}


def build(page_size=1, requests=3, **options):
    config = HybridConfig(**{**SMALL, "window": 8, **options})
    pool = HybridKVPool(
        config.layer_specs(),
        max_tokens=400,
        max_requests=requests,
        max_context=128,
        swa_tokens=requests * (8 + 16 + 2 * page_size),
        page_size=page_size,
    )
    torch.manual_seed(0)
    model = HybridTransformer(config, pool).double().eval()
    return model, pool


def plain_logits(model, config_window, tokens):
    """Attention over the whole sequence with a dense mask: no pool, no pages, no mapping."""
    x = model.embed(torch.tensor(tokens))
    n = len(tokens)
    positions = torch.arange(n)
    for layer in model.layers:
        attention = layer.attention
        h = layer.attention_norm(x)
        d = attention.head_dim
        q, k, v = attention.qkv(h).split([attention.heads * d] + [attention.kv_heads * d] * 2, -1)
        q, k, v = (t.view(n, -1, d) for t in (q, k, v))
        q = rope(attention.q_norm(q), positions, attention.theta)
        k = rope(attention.k_norm(k), positions, attention.theta)
        group = attention.heads // attention.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * d**-0.5
        if attention.softcap:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        back = positions[:, None] - positions[None, :]
        hidden = (back < 0) | (back >= config_window if attention.swa else back < 0)
        scores = scores.masked_fill(hidden, float("-inf"))
        if attention.sinks is not None:
            sink = attention.sinks.float()[:, None, None].expand(-1, n, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.float()).to(x.dtype)
        x = x + attention.out(out.flatten(1))
        x = x + layer.down(torch.nn.functional.gelu(layer.up(layer.mlp_norm(x))))
    return model.head(model.norm(x[-1])).float()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "sinks": False, "qk_norm": False}])
def test_decoding_past_the_window_matches_attention_over_the_whole_sequence(page_size, options):
    model, pool = build(page_size, **options)
    with torch.no_grad():
        result = greedy(model, pool, PROMPTS, 20, chunk=16)
        for prompt, new in zip(PROMPTS, result.tokens, strict=True):
            for step in (0, 1, 9, 19):
                logits = plain_logits(model, 8, prompt + new[:step])
                assert int(logits.argmax()) == new[step], (len(prompt), step)


@pytest.mark.parametrize("page_size", [1, 16])
def test_compiled_decoding_gives_the_tokens_and_rows_of_eager_decoding(page_size):
    runs = []
    for compiled in (False, True):
        model, pool = build(page_size)
        torch._dynamo.reset()
        forward = model
        if compiled:
            forward = torch.compile(model, backend="swa_eager", dynamic=True, fullgraph=True)
        with swa_compile.collect() as reports:
            runs.append((greedy(forward, pool, PROMPTS, 16, chunk=16, table_width=128), pool))
    (eager, eager_pool), (ours, our_pool) = runs
    assert eager.tokens == ours.tokens
    for layer, name in itertools.product(range(4), ("k_cache", "v_cache")):
        want, got = (getattr(p, name)(layer)[page_size:] for p in (eager_pool, our_pool))
        assert torch.allclose(want, got, atol=1e-5), (layer, name)
    assert reports
    for report in reports:
        assert (report.translations_found, report.translation_nodes) == (4, 1)
        assert (report.stores_found, report.stores_lowered) == (4, 4)


def test_the_pool_is_given_back_when_a_run_fails():
    model, pool = build(requests=2)
    with pytest.raises(swa_compile.kv.OutOfSlots):
        greedy(model, pool, PROMPTS[:2], 500, chunk=16)
    assert pool.full_free == pool.full_tokens and pool.swa_free == pool.swa_tokens
