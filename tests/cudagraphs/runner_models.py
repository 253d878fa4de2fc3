"""Modules that tests of `BucketRunner` run, and what one of them is called with."""

import torch

from swa_compile.ops import store_kv, translate_loc

FULL, ROWS = 96, 24


def make_mapping():
    ids = torch.arange(FULL + 1) % (ROWS - 1) + 1
    ids[0], ids[-1] = 0, -1
    return ids


class Store(torch.nn.Module):
    """Stores 1 + k at the translated ids; returns rows of tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(ROWS, 1, 2))
        self.register_buffer("v_cache", torch.zeros(ROWS, 1, 2))
        self.sizes = []

    def forward(self, out_cache_loc, k, full_to_swa_index_mapping):
        self.sizes.append(len(k))
        loc = translate_loc(full_to_swa_index_mapping, out_cache_loc)
        store_kv(self.k_cache, self.v_cache, k + 1, k, loc)
        return k * 2, {"loc": loc, "count": 3, "none": None, "in": k}


def call(runner, ids, seed=0, mapping=None, dtype=torch.int64):
    k = torch.randn(len(ids), 1, 2, generator=torch.Generator().manual_seed(seed))
    mapping = make_mapping() if mapping is None else mapping
    loc = torch.tensor(ids, dtype=dtype)
    return k, runner(out_cache_loc=loc, k=k, full_to_swa_index_mapping=mapping)


class Scaled(torch.nn.Module):
    """The rows of k times the columns of a weight, behind a submodule."""

    def __init__(self):
        super().__init__()
        self.act = torch.nn.Identity()
        self.weight = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2), requires_grad=False)

    def forward(self, k):
        return self.act(k @ self.weight)
