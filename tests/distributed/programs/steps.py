"""A model of fixed weights, a pool, and a run of forwards over it: the same on every rank."""

import torch

from swa_compile import mark_sizes
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer

WINDOW = 8
CONFIG = HybridConfig(
    layers=("swa", "full", "swa"),
    vocab_size=61,
    d_model=32,
    heads=8,
    kv_heads=4,
    head_dim=8,
    window=WINDOW,
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [58, 9, 7], [2, 7, 1, 8, 2, 8])
WIDTH = 32


def pool_of(specs, device="cpu"):
    """A pool whose SWA slots are handed out again while the steps run."""
    return HybridKVPool(
        specs, max_tokens=120, max_requests=4, max_context=WIDTH, swa_tokens=64, device=device
    )


def whole_model(specs=None, config=CONFIG, device="cpu"):
    """The unsharded model in float32 with seeded weights, and a pool of `specs` (or its own)."""
    pool = pool_of(config.layer_specs() if specs is None else specs, device)
    torch.manual_seed(0)
    return HybridTransformer(config, pool).eval().requires_grad_(False).to(device), pool


def rows(pool):
    """Every cache of `pool` on the CPU: K and V of each layer."""
    return [(pool.k_cache(i).cpu(), pool.v_cache(i).cpu()) for i in range(len(pool.layers))]


def steps(decode=3):
    """The new tokens of each forward: ragged prefill in two chunks, then decode past the window.

    They are given, not sampled: rounding must not make two runs part.
    """
    first = {i: list(prompt[:4]) for i, prompt in enumerate(PROMPTS)}
    second = {i: list(prompt[4:]) for i, prompt in enumerate(PROMPTS) if len(prompt) > 4}
    later = [{i: [(7 * step + i) % 61] for i in range(3)} for step in range(decode)]
    return [first, second, *later]


def marked(batch):
    """`batch` with its sizes marked: one compilation serves every step."""
    mark_sizes(batch)
    return batch


def run(forward, pool, pieces=None, prepare=lambda batch: batch, requests=None):
    """Logits of each step, on the CPU; `prepare` sees each batch ahead of its forward."""
    pieces = steps() if pieces is None else pieces
    requests = [pool.open() for _ in range(3)] if requests is None else requests
    logits = []
    with torch.no_grad():
        for step in pieces:
            batch = pool.batch({requests[i]: ids for i, ids in step.items()}, width=WIDTH)
            logits.append(forward(prepare(batch)).cpu())
    return logits
