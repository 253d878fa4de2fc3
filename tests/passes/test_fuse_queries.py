"""Queries that go along with a store, for the attention or because the graph gives them back."""

import importlib

import pytest
import torch

from swa_compile.ops import paged_attention, row_program, store_kv, translate_loc

from .fusing import ROWS, N, agree, ids, pools


def test_queries_that_depend_on_what_was_stored_are_not_computed_with_it(fused):
    def forward(k, v, mapping, loc, caches):
        own = translate_loc(mapping, loc)
        store_kv(*caches, k * 2, v * 2, own)
        q = caches[0][own].neg()
        starts = torch.arange(N + 1, dtype=torch.int32)
        return paged_attention(q, *caches, own[:, None], torch.ones(N, dtype=torch.int32), starts)

    args = (*(torch.randn(N, 2, 16) for _ in "kv"), *ids())
    agree(fused, forward, args, pools((ROWS, 2, 16), (ROWS, 2, 16)))
    ((text, *_),) = fused.programs
    assert len(row_program.read(text)) == 2


def test_a_query_that_is_also_an_output_is_given_to_both(fused):
    def forward(q, k, mapping, loc, caches):
        own = translate_loc(mapping, loc)
        q = q.exp()
        store_kv(*caches, k * 2, k, own)
        starts = torch.arange(N + 1, dtype=torch.int32)
        lens = torch.ones(N, dtype=torch.int32)
        return paged_attention(q, *caches, own[:, None], lens, starts), q, q.sum()

    args = (*(torch.randn(N, 2, 16) for _ in "kv"), *ids())
    agree(fused, forward, args, pools((ROWS, 2, 16), (ROWS, 2, 16)))


def test_queries_go_along_where_the_graph_ends_ahead_of_the_attention(fused):
    """Of each layer its own: what another layer's rows are computed from comes too late."""

    def forward(x, angle, mapping, loc, caches):
        own, queries = translate_loc(mapping, loc), []
        for k_cache, v_cache in zip(caches[::2], caches[1::2], strict=True):
            q, k, v = (t.view(N, 2, 16) for t in (x * 1.5).chunk(3, -1))
            q, k = q * angle[:, None].cos(), k * angle[:, None].cos()
            store_kv(k_cache, v_cache, k, v.exp(), own)
            queries.append(q)
            x = x @ x.T @ x / 100
        return (*queries, x.exp())

    torch.manual_seed(0)
    args = torch.randn(N, 96), torch.randn(N, 16), *ids()
    agree(fused, forward, args, pools(*[(ROWS, 2, 16)] * 4), stores=2, n_fused=2)
    for text, *_ in fused.programs:
        assert [output["target"] for output in row_program.read(text)] == [0, 1, 2]


def views_and_their_owner(y):
    return y.view(N, 2, 16), y, y[:2]


def views_of_one_owner(y):
    return y.view(N, 2, 16), y.view(N, 2, 16, 1)


def a_view_of_a_view(y):
    rows = y.view(N, 2, 16)
    return rows, rows.view(N, 4, 8)


def one_view_twice(y):
    rows = y.view(N, 2, 16)
    return rows, rows


@pytest.mark.parametrize(
    ("returned", "queries"),
    [
        (views_and_their_owner, 1),
        (views_of_one_owner, 0),
        (a_view_of_a_view, 1),
        (one_view_twice, 1),
    ],
)
@pytest.mark.parametrize("read", [False, True])
def test_outputs_of_one_memory_stay_one(fused, returned, queries, read):
    def forward(q, k, mapping, loc, caches):
        own = translate_loc(mapping, loc)
        store_kv(*caches, q * k, k, own)
        outputs = returned(q.flatten(1) * 2)
        if not read:
            return outputs
        starts = torch.arange(N + 1, dtype=torch.int32)
        lens = torch.ones(N, dtype=torch.int32)
        return *outputs, paged_attention(outputs[0], *caches, own[:, None], lens, starts)

    args = (*(torch.randn(N, 2, 16) for _ in "kv"), *ids())
    caches = pools((ROWS, 2, 16), (ROWS, 2, 16))
    agree(fused, forward, args, caches)
    ((text, *_),) = fused.programs
    if not read:
        assert len(row_program.read(text)) == 2 + queries
    with torch.no_grad():
        first, second, *_ = fused(forward)(*args, caches)
    first.zero_()
    assert not second.any()


def test_queries_that_no_kernel_here_can_write_stay_where_they_are(fused, monkeypatch):
    """As float8 on an older GPU; the rows of the caches are written all the same."""
    module = importlib.import_module("swa_compile.passes.fuse_rows")
    known = lambda node: node.meta["val"].dtype is torch.float32  # noqa: E731
    monkeypatch.setattr(module, "worthwhile", known)

    def forward(q, k, mapping, loc, caches):
        store_kv(*caches, q * k, k, translate_loc(mapping, loc))
        return (q * 2).half(), q * 3

    args = (*(torch.randn(N, 2, 16) for _ in "kv"), *ids())
    agree(fused, forward, args, pools((ROWS, 2, 16), (ROWS, 2, 16)))
    ((text, *_),) = fused.programs
    assert len(row_program.read(text)) == 3
