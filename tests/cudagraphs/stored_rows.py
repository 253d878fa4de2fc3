"""A function that stores rows in a cache, what it is called with, and one graph of it."""

import torch

from swa_compile.bucket import Inputs
from swa_compile.cudagraphs import CapturedGraph

ROWS = 10


def store(values):
    """Writes rows of the cache (place 0), and returns what it read before and some more."""
    cache, loc, k = values
    values.clear()
    before = cache[loc].clone()
    cache[loc] = k
    return [before, k * 2, cache, None, 5]


def inputs(seed, cache):
    g = torch.Generator().manual_seed(seed)
    loc = torch.randperm(ROWS - 1, generator=g)[:3] + 1
    return [cache, loc, torch.randn(3, 4, generator=g)]


def make(recorder, run=store, **options):
    options.setdefault("inputs", Inputs(written=frozenset({0}), names=["k_cache", "loc", "k"]))
    return CapturedGraph(run, recorder, **options)
