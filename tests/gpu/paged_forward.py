"""A forward over paged caches, batches for it, and its agreement with eager code row by row.

The reference runs the same forward eagerly on the CPU, in float64.
"""

import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

FULL, ROWS, LAYERS, HEADS, DIM = 192, 48, 4, 2, 16
WIDTH = HEADS * DIM
MODES = ["off", "full", "piecewise", "inductor", "auto"]
OURS = ["full", "piecewise", "auto"]


class Forward(torch.nn.Module):
    """Layer 0 stores and attends by full ids, the others by translated ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH) / 6)
        for i in range(LAYERS):
            rows = ROWS if i else FULL
            self.register_buffer(f"k{i}", torch.randn(rows, HEADS, DIM))
            self.register_buffer(f"v{i}", torch.randn(rows, HEADS, DIM))

    def caches(self):
        return [getattr(self, f"{kv}{i}") for i in range(LAYERS) for kv in "kv"]

    def forward(self, x, mapping, out_cache_loc, page_table, seq_lens, cu_seqlens_q):
        for i in range(LAYERS):
            k_cache, v_cache = getattr(self, f"k{i}"), getattr(self, f"v{i}")
            q = (x @ self.w[i]).view(-1, HEADS, DIM)
            loc, table = out_cache_loc, page_table
            if i:
                loc = translate_loc(mapping, loc)
                table = translate_page_table(mapping, table, 1).to(torch.int32)
            store_kv(k_cache, v_cache, q * 2, q + 1, loc)
            out = paged_attention(q, k_cache, v_cache, table, seq_lens, cu_seqlens_q)
            x = x + out.reshape(x.shape)
        return x


def make_mapping(shift=0):
    ids = (torch.arange(FULL + 1) + shift) % (ROWS - 1) + 1
    ids[0], ids[-1] = 0, -1
    return ids


def decode(n, seed, shift=0):
    """n requests of two tokens, the second of which is new; full ids beyond the SWA pool."""
    g = torch.Generator().manual_seed(seed)
    n_slots = (ROWS - 2) // 2
    slots = torch.randperm(2 * n_slots, generator=g)[: 2 * n].view(n, 2) + 2 * ROWS
    cu, lens = torch.arange(n + 1, dtype=torch.int32), torch.full((n,), 2, dtype=torch.int32)
    x = torch.randn(n, WIDTH, generator=g)
    return [x, make_mapping(shift), slots[:, 1].contiguous(), slots.int(), lens, cu]


def extend(n, seed, shift=0):
    """The same tokens as one request."""
    x, mapping, loc, _, _, _ = decode(n, seed, shift)
    table = torch.cat([loc.int(), torch.zeros(32 - n, dtype=torch.int32)])[None]
    return [x, mapping, loc, table, torch.tensor([n]).int(), torch.tensor([0, n]).int()]


def on_gpu(args, keep=None):
    moved = [arg.cuda() for arg in args]
    swa_compile.mark_sizes(*[arg for i, arg in enumerate(moved) if i != 1])
    if keep is not None:
        keep.append(moved)  # so that no address comes twice
    return moved


def double(args):
    return [arg.double() if arg.is_floating_point() else arg for arg in args]


def same_rows(model, reference):
    for got, want in zip(model.caches(), reference.caches(), strict=True):
        wrong = (got.cpu().double() - want).abs().flatten(1).amax(1)[1:] > 2e-3
        assert not wrong.any(), (wrong.nonzero().flatten() + 1).tolist()


def compiled_pair(**options):
    model, reference = Forward().cuda(), Forward().double()
    return model, reference, torch.compile(model, backend="swa", options=options)


def agree(model, reference, compiled, batches, keep=None):
    kept = []
    with torch.no_grad():
        for args in batches:
            want = reference(*double(args))
            kept.append((compiled(*on_gpu(args, keep)), want))
            same_rows(model, reference)
        for got, want in kept:  # B41: outputs outlive the replays behind them
            torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=2e-3)
