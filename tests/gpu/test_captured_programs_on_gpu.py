"""CUDA graphs on a GPU of programs that put ids, batches or outputs together and apart."""

import pytest
import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc

from .paged_forward import DIM, FULL, HEADS, ROWS, WIDTH, decode, make_mapping, on_gpu

pytestmark = pytest.mark.usefixtures("fresh")


def test_multi_step_draft_decode_stores_each_step_in_its_own_rows():
    """Row A8: strided pieces of one loc, one gather, captured."""
    bs, topk, count = 3, 2, 4
    pools = [torch.zeros(2, ROWS, HEADS, DIM, device="cuda") for _ in range(count)]

    def forward(mapping, loc, k):
        steps = loc.view(bs, topk, count).permute(2, 0, 1).reshape(count, -1)
        for i, (k_cache, v_cache) in enumerate(pools):
            store_kv(k_cache, v_cache, k[i], k[i] + 1, translate_loc(mapping, steps[i]))
        return k.sum()

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    with torch.no_grad(), swa_compile.collect() as reports:
        for seed in range(4):
            g = torch.Generator().manual_seed(seed)
            loc = torch.randperm(ROWS - 2, generator=g)[: bs * topk * count] + 2 * ROWS
            mapping = make_mapping(seed)
            k = torch.randn(count, bs * topk, HEADS, DIM, generator=g)
            want = [pool.cpu().clone() for pool in pools]
            table = loc.view(bs, topk, count)
            for step in range(count):
                for lane in range(bs * topk):
                    row = mapping[table[lane // topk, lane % topk, step]]
                    want[step][0, row], want[step][1, row] = k[step, lane], k[step, lane] + 1
            compiled(mapping.cuda(), loc.cuda(), k.cuda())
            for pool, rows in zip(pools, want, strict=True):
                assert torch.equal(pool.cpu()[:, 1:], rows[:, 1:])
    assert reports[0].translation_nodes == 1 and reports[0].captures.full_replays == 3


def test_attention_narrowed_to_the_live_tokens():
    """Rows A5 and A18: loc is padded in the graph; the store of one layer sees `loc[:n]`."""
    narrow, wide = (torch.zeros(2, ROWS, HEADS, DIM, device="cuda") for _ in range(2))

    def forward(mapping, loc, k, pad):
        padded = torch.cat([loc, pad])
        ids = translate_loc(mapping, padded)
        store_kv(*wide, torch.cat([k, k[: pad.shape[0]]]), torch.cat([k, k[: pad.shape[0]]]), ids)
        store_kv(*narrow, k, k, translate_loc(mapping, padded[: loc.shape[0]]))
        return ids[: loc.shape[0]]

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    pad = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for seed in range(4):
            g = torch.Generator().manual_seed(seed)
            loc = torch.randperm(ROWS - 2, generator=g)[:5] + 2 * ROWS
            mapping, k = make_mapping(seed), torch.randn(5, HEADS, DIM, generator=g)
            want = narrow.cpu().clone()
            want[:, mapping[loc]] = k
            got = compiled(mapping.cuda(), loc.cuda(), k.cuda(), pad.cuda())
            assert torch.equal(got.cpu(), mapping[loc])
            assert torch.equal(narrow.cpu()[:, 1:], want[:, 1:])
            assert torch.equal(wide.cpu()[:, 1:], want[:, 1:])


def test_tensors_that_are_put_together_behind_the_cuts_have_one_memory():
    """Inductor has kernels write into slices of a concatenation; across cuts that was lost."""

    def forward(q, k_cache, v_cache, table, lens, cu, w):
        outputs, tokens = [], []
        for _ in range(3):
            out = paged_attention(q, k_cache, v_cache, table, lens, cu)
            outputs.append(out.flatten(1) @ w)
            tokens.append((outputs[-1].sin() @ w).argmax(-1))
            q = q + w[tokens[-1]].view(q.shape) + outputs[-1].cos().view(q.shape)
        return torch.cat(outputs, 1), torch.stack(tokens, 1)

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "piecewise"})
    w = torch.randn(WIDTH, WIDTH).cuda() / 6
    caches = [torch.randn(FULL, HEADS, DIM).cuda() for _ in "kv"]
    with torch.no_grad(), swa_compile.collect() as reports:
        for i, n in enumerate((4, 6, 4, 6, 4, 6)):
            _, _, _, table, lens, cu = on_gpu(decode(n, i))
            q = torch.randn(n, HEADS, DIM, device="cuda")
            swa_compile.mark_sizes(q, table, lens, cu)
            got = compiled(q, *caches, table, lens, cu, w)
            want = forward(q, *caches, table, lens, cu, w)
            torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3)
            assert torch.equal(got[1], want[1])
    assert reports[0].partitions >= 3 and reports[0].captures.replays == 4
