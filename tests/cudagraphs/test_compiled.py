"""The `swa` backend cuts, records and repeats: modes agree with eager code, row by row."""

import pytest
import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

pytestmark = pytest.mark.inductor

FULL, ROWS, LAYERS, HEADS, DIM = 96, 24, 3, 2, 8
WIDTH = HEADS * DIM


class Forward(torch.nn.Module):
    """Stores and attends in each layer; layer 0 on the full ids, the others on translated ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH) / 4)
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


def make_mapping():
    ids = torch.arange(FULL + 1) % (ROWS - 1) + 1
    ids[0], ids[-1] = 0, -1
    return ids


def decode(n, seed):
    """n requests of two tokens each, the second of which is new; ids beyond the SWA pool."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(ROWS - 2, generator=g)[: 2 * n].view(n, 2) + ROWS * 2
    cu = torch.arange(n + 1, dtype=torch.int32)
    lens = torch.full((n,), 2, dtype=torch.int32)
    return [torch.randn(n, WIDTH, generator=g), make_mapping(), slots[:, 1].contiguous(),
            slots.int(), lens, cu]  # fmt: skip


def extend(n, seed):
    """The same tokens as one request."""
    x, mapping, loc, table, _, _ = decode(n, seed)
    table = torch.cat([loc.int(), loc.new_zeros(16 - n).int()])[None]
    return [x, mapping, loc, table, torch.tensor([n]).int(), torch.tensor([0, n]).int()]


def agree(model, compiled, reference, batches):
    """Every output and every row of every cache, after each call."""
    with torch.no_grad():
        outs = []
        for args in batches:
            want = reference(*args)
            swa_compile.mark_sizes(*[a for i, a in enumerate(args) if i != 1])
            outs.append((compiled(*args), want))
            for got, expected in zip(model.caches(), reference.caches(), strict=True):
                wrong = (got - expected).abs().flatten(1).amax(1)[1:] > 1e-4
                assert not wrong.any(), wrong.nonzero()
        for got, want in outs:  # also those kept past later replays
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def run(make, sizes, **options):
    model, reference = Forward(), Forward()
    compiled = torch.compile(model, backend="swa", options=options)
    with swa_compile.collect() as reports:
        agree(model, compiled, reference, [make(n, i) for i, n in enumerate(sizes)])
    return model, compiled, reference, reports


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto"])
@pytest.mark.parametrize("make", [decode, extend])
def test_modes_agree_with_eager_code(on_cpu, mode, make):
    """Row B39: sizes come and go, with other data each time."""
    *_, reports = run(make, [4, 8, 4, 8, 4, 8, 4], cudagraphs=mode)
    (report,) = reports
    captures = report.captures
    full = mode == "full" or (mode == "auto" and make is decode)
    assert report.partitions == (None if mode == "full" else LAYERS + 1)
    graphs = 1 if full else LAYERS + 1
    assert captures.captures == (2 + captures.recaptured) * graphs
    assert (captures.uncaptured, captures.replays) == (2, 5)
    assert captures.full_replays == (5 if full else 0)
    # What lies between the pieces has no memory pool on the CPU, so that it may move, twice.
    assert captures.recaptured <= (0 if full else 4)
    assert sorted(captures.memory) == ["4 tokens", "8 tokens"]
    assert not captures.skipped
