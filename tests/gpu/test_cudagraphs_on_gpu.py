"""CUDA graphs on a GPU: every mode agrees with eager code row by row, and nothing is stale.

The reference runs the same forward eagerly on the CPU, in float64.
"""

import json
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch

import swa_compile
from swa_compile.cudagraphs import CaptureUseError
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table
from swa_compile.viewer.dump import Dump
from swa_compile.viewer.records import CAPTURES_FORMAT
from swa_compile.viewer.story import tell

FULL, ROWS, LAYERS, HEADS, DIM = 192, 48, 4, 2, 16
WIDTH = HEADS * DIM
MODES = ["off", "full", "piecewise", "inductor", "auto"]
OURS = ["full", "piecewise", "auto"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch.cuda.synchronize()
    torch._dynamo.reset()


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


@pytest.mark.parametrize("make", [decode, extend])
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_with_eager_code_row_by_row(mode, make):
    """Rows A6, B39 and B40: sizes 4, 8, 4 with other data, ids, tables and mapping each time."""
    model, reference, compiled = compiled_pair(cudagraphs=mode)
    with swa_compile.collect() as reports:
        sizes = [4, 8, 4, 8, 4, 8, 4, 8]
        if mode == "inductor":
            sizes = sizes[:4]
            with torch.no_grad():
                for i, n in enumerate(sizes):
                    torch.compiler.cudagraph_mark_step_begin()
                    args = make(n, i, shift=i)
                    want = reference(*double(args))
                    got = compiled(*on_gpu(args)).clone()
                    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=2e-3)
                    same_rows(model, reference)
            return
        batches = [make(n, i, shift=i) for i, n in enumerate(sizes)]
        agree(model, reference, compiled, batches, keep=[])
    if mode == "off":
        assert reports[0].captures is None
        return
    captures = reports[0].captures
    full = mode == "full" or (mode == "auto" and make is decode)
    assert not captures.skipped, captures.summary()
    assert captures.captures == (2 + captures.recaptured) * (1 if full else LAYERS + 1)
    assert (captures.uncaptured, captures.replays) == (2, 6)
    assert captures.full_replays == (6 if full else 0)
    assert captures.recaptured <= (0 if full else 4)
    assert sum(captures.memory.values()) > 0  # B52


@pytest.mark.parametrize("mode", OURS)
def test_steady_replays_copy_only_small_inputs_and_never_synchronize(mode):
    *_, compiled = compiled_pair(cudagraphs=mode)
    with torch.no_grad(), swa_compile.collect() as reports:
        keep = []
        for seed in range(6):
            compiled(*on_gpu(extend(8, seed), keep))
        captures = reports[0].captures
        copied, recaptured = captures.copied_inputs, captures.recaptured
        args = on_gpu(extend(8, 7), keep)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                compiled(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert captures.recaptured == recaptured
    # The six inputs of a call at most; nothing between the pieces.
    assert captures.copied_inputs - copied <= 3 * 6


def test_no_island_output_is_copied_in_the_steady_state():
    """The pool between the pieces gives the same addresses again."""
    *_, compiled = compiled_pair(cudagraphs="piecewise")
    args = on_gpu(extend(8, 0))
    with torch.no_grad(), swa_compile.collect() as reports:
        for _ in range(8):
            compiled(*args)
        captures = reports[0].captures
        before = captures.copied_inputs, captures.recaptured
        for _ in range(4):
            compiled(*args)
    assert (captures.copied_inputs, captures.recaptured) == before


def test_an_island_reads_what_a_captured_piece_left_and_feeds_the_next():
    """Row A26: hoisted values keep their addresses across segments, whatever the island does."""
    model, reference, compiled = compiled_pair(cudagraphs="piecewise")
    ballast = []
    with torch.no_grad():
        for seed in range(8):
            args = extend(6, seed, shift=seed)
            want = reference(*double(args))
            ballast.append(torch.full((seed * 1000 + 1,), 7.0, device="cuda"))  # moves allocations
            got = compiled(*on_gpu(args))
            torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=2e-3)
            same_rows(model, reference)


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("mode", OURS)
def test_views_at_any_address_are_read_at_every_call(mode, apart):
    """Inductor copies inputs that are not aligned to 16 bytes, ahead of its code, at every call."""
    model, reference, compiled = compiled_pair(cudagraphs=mode)
    packed = torch.zeros(2, 64, dtype=torch.int32, device="cuda")
    held = on_gpu(extend(8, 0))
    held[4] = packed[0, apart : apart + 1]
    held[3] = packed[1, apart : apart + 32][None]
    with torch.no_grad(), swa_compile.collect() as reports:
        for seed in range(6):
            args = extend(8, seed, shift=seed)
            earlier = torch.arange(90, 90 + seed % 3, dtype=torch.int32)
            args[3] = torch.cat([earlier, args[3][0]])[None, :32]
            args[4] += len(earlier)
            for mine, new in zip(held, args, strict=True):
                mine.copy_(new)
            swa_compile.mark_sizes(*[arg for i, arg in enumerate(held) if i != 1])
            want = reference(*double(args))
            torch.testing.assert_close(compiled(*held).cpu().double(), want, rtol=2e-3, atol=2e-3)
            same_rows(model, reference)
        captures = reports[0].captures
    assert captures.replays == 5
    if apart or mode == "full":
        assert captures.direct_replays == 0
    else:
        assert captures.direct_replays > 0


@pytest.mark.parametrize("mode", OURS)
def test_capturing_leaves_every_row_that_the_call_does_not_write(mode):
    """Row B15: the call that records writes its own rows once, and no other."""
    model, _, compiled = compiled_pair(cudagraphs=mode)
    with torch.no_grad():
        for seed in range(3):
            args = decode(5, seed)
            before = [cache.clone() for cache in model.caches()]
            compiled(*on_gpu(args))
            for i, (cache, old) in enumerate(zip(model.caches(), before, strict=True)):
                ids = args[2] if i < 2 else args[1][args[2]]
                changed = (cache != old).flatten(1).any(1).nonzero().flatten().cpu()
                assert set(changed.tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("mode", OURS)
def test_a_replaced_pool_is_written_and_the_old_one_is_not(mode):
    """Row B51."""
    model, reference, compiled = compiled_pair(cudagraphs=mode)
    with swa_compile.collect() as reports:
        agree(model, reference, compiled, [decode(4, i) for i in range(3)])
        old = [cache.data for cache in model.caches()]
        before = [cache.clone() for cache in old]
        for cache, other in zip(model.caches(), reference.caches(), strict=True):
            cache.data = torch.full_like(cache, 3.0)
            other.data = torch.full_like(other, 3.0)
        agree(model, reference, compiled, [decode(4, i) for i in range(3, 6)])
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
    assert sum(report.captures.recaptured for report in reports) >= 1


def test_a_mapping_edited_in_place_or_replaced_is_read_live():
    """Row B46: same storage, new contents; then another tensor."""
    model, reference, compiled = compiled_pair(cudagraphs="full")
    mapping = make_mapping().cuda()
    with torch.no_grad():
        for seed in range(8):
            args = decode(4, seed, shift=seed)
            if seed < 5:
                mapping.copy_(args[1])
            else:
                mapping = args[1].cuda()
            want = reference(*double(args))
            given = on_gpu(args)
            given[1] = mapping
            got = compiled(*given)
            torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=2e-3)
            same_rows(model, reference)


@pytest.mark.parametrize("n", [8, 2, 1, 0, 22])
def test_every_size_runs_in_at_most_two_compilations(n):
    """Row B49. Two were seen for 0 and 1 with torch 2.11, for a reason that is not known."""
    model, reference, compiled = compiled_pair(cudagraphs="auto")
    with swa_compile.collect() as reports:
        agree(model, reference, compiled, [decode(8, 9)] + [decode(n, i) for i in range(3)])
    assert len(reports) <= (2 if n < 2 else 1)
    replays = sum(report.captures.replays for report in reports)
    assert replays == (0 if n == 0 else 3 if n == 8 else 2)


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


def test_a_piece_beside_a_custom_op_that_writes_an_input():
    """Row B38."""
    model, reference, compiled = compiled_pair(
        cudagraphs="piecewise",
        lower_stores=False,
        split_ops=["swa::store_kv", "swa::paged_attention"],
    )
    agree(model, reference, compiled, [decode(4, i) for i in range(5)], keep=[])


@torch.library.custom_op("swa_gpu_test::syncs", mutates_args=())
def syncs(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().amax() > -1)  # reads a value on the host


@syncs.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_failed_capture_is_named_and_leaves_the_allocator_and_the_generators():
    """Rows B41 and B44: an operator that synchronizes cannot be recorded."""

    def forward(x):
        return torch.sin(syncs(x) + 1)

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    x = torch.randn(8, device="cuda")
    with torch.no_grad():
        compiled(x)
        with pytest.warns(UserWarning, match="CAPTURE_SKIPPED"):
            got = compiled(x)
        torch.testing.assert_close(got, torch.sin(x + 1))
        torch.testing.assert_close(compiled(x), torch.sin(x + 1))
        # All of these fail where a capture is believed to go on.
        torch.rand(4, device="cuda")
        torch.empty(1 << 26, device="cuda")
        torch.cuda.empty_cache()
        other = torch.compile(lambda x: x.cos(), backend="swa", options={"cudagraphs": "full"})
        for _ in range(3):
            torch.testing.assert_close(other(x), x.cos())
        strict = torch.compile(
            lambda x: syncs(x) * 2, backend="swa", options={"cudagraphs": "full", "strict": True}
        )
        strict(x)
        with pytest.raises(swa_compile.HoistError, match="CAPTURE_SKIPPED"):
            strict(x)


def test_an_operator_that_cannot_be_captured_is_cut_out():
    def forward(x):
        return torch.sin(syncs(torch.cos(x)) + 1)

    options = {"cudagraphs": "piecewise", "split_ops": ["swa_gpu_test::syncs"]}
    compiled = torch.compile(forward, backend="swa", options=options)
    with torch.no_grad(), swa_compile.collect() as reports:
        for _ in range(5):
            x = torch.randn(64, device="cuda")
            torch.testing.assert_close(compiled(x), torch.sin(torch.cos(x) + 1))
    assert reports[0].captures.pieces == 2
    assert reports[0].captures.replays == 4


def test_a_cpu_tensor_is_reported_with_name_and_line_and_its_value_is_used():
    """Rows B44 and B45."""

    def forward(x, scale):
        return x * scale

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    with (
        torch.no_grad(),
        swa_compile.collect() as reports,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for value in (2.0, 3.0, 4.0):
            x = torch.randn(8, device="cuda")
            torch.testing.assert_close(compiled(x, torch.tensor(value)), x * value)
    (text,) = [str(w.message) for w in warned if "CAPTURE_SKIPPED" in str(w.message)]
    assert re.search(r"test_cudagraphs_on_gpu.py:\d+: .*scale is a tensor", text)
    (skip,) = reports[0].captures.skipped
    assert skip.argument == "scale" and skip.source


def test_another_stream_and_a_second_thread_are_refused():
    compiled = torch.compile(lambda x: x * 2, backend="swa", options={"cudagraphs": "full"})
    x = torch.ones(8, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(CaptureUseError, match="another stream"):
            compiled(x)
        result = []

        def call():
            with torch.no_grad():
                result.append(compiled(x))

        thread = threading.Thread(target=call)  # one after the other is fine
        thread.start()
        thread.join()
    assert result[0].tolist() == [2.0] * 8


def test_captured_inside_a_graph_of_the_callers():
    compiled = torch.compile(lambda x: x * 2 + 1, backend="swa")
    x = torch.ones(8, device="cuda")
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        x.fill_(5)
        graph.replay()
    assert out.tolist() == [11.0] * 8


def test_buckets_share_memory():
    """Row B52: a smaller size that is recorded later fits into what the larger one left."""
    *_, compiled = compiled_pair(cudagraphs="piecewise")
    with torch.no_grad(), swa_compile.collect() as reports:
        for n in (20, 20, 10, 10):
            compiled(*on_gpu(extend(n, n)))
    memory = reports[0].captures.memory
    assert set(memory) == {"20 tokens", "10 tokens"}
    assert 0 <= memory["10 tokens"] <= memory["20 tokens"]
    assert memory["20 tokens"] > 0


def test_a_graph_keeps_no_cache_alive():
    def forward(cache, x):
        cache[:4] = x
        return cache.sum()

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "full"})
    cache, x = torch.zeros(1 << 20, 8, device="cuda"), torch.ones(4, 8, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(cache, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del cache
    assert before - torch.cuda.memory_allocated() >= 32 << 20


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


def test_the_dump_says_what_was_captured_and_a_replay_leaves_it_alone(tmp_path):
    *_, compiled = compiled_pair(cudagraphs="auto", dump_dir=str(tmp_path))
    with torch.no_grad(), swa_compile.collect() as reports:
        for n, make in [(4, decode), (8, extend)] * 3:
            compiled(*on_gpu(make(n, n)))
    report = reports[-1]  # the one for any number of requests; 1 may have had one of its own
    captures, folder = report.captures, Path(report.dump)
    said = json.loads((folder / "captures.json").read_text())
    around = {"format": CAPTURES_FORMAT, "time": said["time"], "further_sizes": 0}
    assert {**captures.to_dict(), **around} == said
    assert said["recorded"]["4 tokens"]["whole"] is True
    assert said["recorded"]["8 tokens"]["pieces"] == list(range(LAYERS + 1))
    pieces = [p for p in tell(Dump.read(folder))["pieces"] if "piece" in p]
    assert len(pieces) == LAYERS + 1 and all(p["line"] for p in pieces)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with torch.no_grad():
        for _ in range(3):
            compiled(*on_gpu(decode(4, 4)))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
