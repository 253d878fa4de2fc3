"""The `swa` backend cuts, records and repeats: modes agree with eager code, row by row."""

import pytest
import torch

import swa_compile
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table
from swa_compile.runner import BucketRunner

from .runner_models import FULL, ROWS, make_mapping

pytestmark = pytest.mark.inductor

LAYERS, HEADS, DIM = 3, 2, 8
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


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (decode, "full"),
        (decode, "auto"),
        (extend, "piecewise"),
        pytest.param(decode, "piecewise", marks=pytest.mark.slow),
        pytest.param(extend, "full", marks=pytest.mark.slow),
        pytest.param(extend, "auto", marks=pytest.mark.slow),
    ],
)
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
    assert captures.direct_replays == (0 if full else 3)
    assert captures.recaptured == 0
    assert sorted(captures.memory) == ["4 tokens", "8 tokens"]
    assert not captures.skipped


def test_batches_past_the_largest_bucket_record_nothing(on_cpu):
    """They lie somewhere else each time, so that a graph would be bound to memory of one call."""
    model, reference = Forward(), Forward()
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": "auto"})
    names = ["x", "mapping", "out_cache_loc", "page_table", "seq_lens", "cu_seqlens_q"]
    runner = BucketRunner(
        lambda **given: compiled(*[given[name] for name in names]),
        [4],
        live=["mapping"],
        progress=False,
    )
    mapping = make_mapping()
    with torch.no_grad(), swa_compile.collect() as reports:
        for i, n in enumerate([4, 8, 8, 8, 8, 3]):
            args = decode(n, i)
            args[1] = mapping
            want = reference(*args)
            got = runner(**dict(zip(names, args, strict=True)))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            for mine, other in zip(model.caches(), reference.caches(), strict=True):
                torch.testing.assert_close(mine[1:], other[1:], rtol=1e-4, atol=1e-4)
        (report,) = reports
        assert list(report.captures.memory) == ["4 tokens"]
        # The warm-up, and those of eight.
        assert (report.captures.uncaptured, report.captures.recaptured) == (1 + 4, 0)
    assert runner.uncaptured == 4


def test_pieces_hold_the_one_read_of_the_mapping(on_cpu):
    """Rows B42 and B43: no piece is empty, and only tensors and numbers are handed to one."""
    seen = []
    from swa_compile import pieces

    record = pieces.Piece._record

    def watch(self, call, args):
        seen.append((self.index, [type(arg) for arg in args]))
        return record(self, call, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces.Piece, "_record", watch)
        *_, reports = run(decode, [4, 4], cudagraphs="piecewise")
    (report,) = reports
    assert report.translation_nodes == 1 and report.mapping_kernels_late == 0
    assert report.mapping_kernels >= 1
    assert [index for index, _ in seen] == list(range(LAYERS + 1))
    for _, kinds in seen:
        assert kinds and set(kinds) <= {torch.Tensor, torch.nn.Parameter, int}
    assert report.cache_copies == 0


def test_a_warm_start_captures_too(on_cpu):
    """Code from a cache is cut and wrapped like new code, and the record starts anew."""
    *_, first = run(decode, [4, 4, 4], cudagraphs="piecewise")
    torch._dynamo.reset()
    *_, second = run(decode, [4, 4, 4], cudagraphs="piecewise")
    assert [first[0].from_cache, second[0].from_cache] == [False, True]
    assert first[0].partitions == second[0].partitions == LAYERS + 1
    for reports in (first, second):
        captures = reports[0].captures
        assert captures.captures == (LAYERS + 1) * (1 + captures.recaptured)
    assert len(on_cpu) == 2  # not the first one's recordings again


@pytest.mark.slow
def test_two_models_of_one_code_do_not_share_recordings(on_cpu):
    options = {"cudagraphs": "piecewise"}
    first = run(decode, [4, 4, 4], **options)
    torch._dynamo.reset()
    second = run(decode, [4, 4, 4], **options)
    for model, compiled, reference, _ in (first, second, first):
        agree(model, compiled, reference, [decode(4, 9)])


def test_other_split_ops_cut_elsewhere(on_cpu):
    """Row B36, also without a new cache folder."""
    cut = [
        run(decode, [4, 4], cudagraphs="piecewise", lower_stores=False, split_ops=ops)[-1][0]
        for ops in (["swa::paged_attention"], ["swa::store_kv", "swa::paged_attention"])
        if torch._dynamo.reset() is None
    ]
    assert [report.from_cache for report in cut] == [False, False]
    assert cut[0].partitions == LAYERS + 1
    assert cut[1].partitions is not None


def test_a_mutating_split_op_writes_the_callers_cache(on_cpu):
    """Row B38: a piece beside an input that a custom op between the pieces writes."""
    *_, reports = run(
        decode, [4, 4, 4, 4], cudagraphs="piecewise", lower_stores=False,
        split_ops=["swa::store_kv", "swa::paged_attention"],
    )  # fmt: skip
    assert (reports[0].captures.replays, reports[0].captures.direct_replays) == (3, 0)


def test_a_number_on_the_host_that_changes_is_used(on_cpu):
    """Row B45."""

    def forward(x, factor):
        return x * factor

    compiled = torch.compile(forward, backend="swa", options={"cudagraphs": "auto"})
    with torch.no_grad():
        for factor in (2.0, 3.0, 4.0, 5.0, 5.0, 6.0):
            x = torch.randn(4)
            torch.testing.assert_close(compiled(x, factor), x * factor)


@pytest.mark.parametrize("guards", ["all", "none on modules"])
def test_a_replaced_pool_of_the_model_renews_the_recordings(on_cpu, guards):
    """Row B51, also where an engine leaves out the guards on its modules."""
    options = {"cudagraphs": "full"}
    if guards != "all":
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    model, compiled, reference, reports = run(decode, [4, 4, 4], **options)
    old = [cache.clone() for cache in model.caches()]
    held = [cache.data for cache in model.caches()]
    for cache, other in zip(model.caches(), reference.caches(), strict=True):
        cache.data = cache.data.clone().fill_(3)
        other.data = other.data.clone().fill_(3)
    agree(model, compiled, reference, [decode(4, seed) for seed in (7, 8)])
    assert all(torch.equal(a, b) for a, b in zip(old, held, strict=True))
    assert reports[0].captures.recaptured >= 1


def test_a_graph_with_gradients_is_not_captured(on_cpu):
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="swa", options={"cudagraphs": "full"})
    with pytest.warns(UserWarning, match="CAPTURE_SKIPPED: a graph with gradients"):
        compiled(torch.randn(3, 4)).sum().backward()
    assert model.weight.grad is not None and not on_cpu


@pytest.mark.slow
def test_capture_sizes_are_tokens(on_cpu):
    *_, reports = run(decode, [4, 8] * 3, cudagraphs="auto", capture_sizes=[8])
    captures = reports[0].captures
    assert list(captures.memory) == ["8 tokens"]
    assert (captures.replays, captures.uncaptured) == (2, 4)
    assert [skip.tokens for skip in captures.skipped] == [4]


@pytest.mark.slow
def test_the_report_stays_json(on_cpu):
    import json

    *_, reports = run(decode, [4, 4, 4], cudagraphs="auto")
    data = json.loads(json.dumps(reports[0].to_dict()))
    assert data["captures"]["full_replays"] == 2
    assert "CUDA graphs" in reports[0].summary()
    assert swa_compile.GraphReport.from_dict(data).captures is None


def test_one_compilation_serves_all_buckets_of_a_runner(on_cpu):
    """Row B49 over compiled code: at most two compilations for N in {0, 1, 2, 8, 64}."""
    from swa_compile.runner import BucketRunner

    model, reference = Forward(), Forward()
    runner = BucketRunner(
        torch.compile(model, backend="swa"), [1, 2, 8], live=["mapping"], progress=False
    )
    with torch.no_grad(), swa_compile.collect() as reports:
        mapping = make_mapping()
        for seed, n in enumerate((8, 2, 1, 0, 5, 8)):
            args = decode(n, seed)
            args[1] = mapping
            names = ("x", "mapping", "out_cache_loc", "page_table", "seq_lens", "cu_seqlens_q")
            got = runner(**dict(zip(names, args, strict=True)))
            if n:
                torch.testing.assert_close(got, reference(*args), rtol=1e-4, atol=1e-4)
            assert got.shape == (n, WIDTH)
            for ours, expected in zip(model.caches(), reference.caches(), strict=True):
                torch.testing.assert_close(ours[1:], expected[1:], rtol=1e-4, atol=1e-4)
    assert len(reports) <= 2
    assert sum(report.captures.captures for report in reports) == 3
    assert sum(report.captures.copied_inputs for report in reports) == 0
    assert all(use.graph_bytes for use in runner.buckets)


@pytest.mark.parametrize("lower", [True, False])
def test_small_caches_among_the_arguments_are_written_where_they_are(on_cpu, lower):
    """Moved at every call, they are bound anew at every call, and never read from a copy."""

    def forward(k_cache, v_cache, mapping, loc, k):
        loc = translate_loc(mapping, loc)
        store_kv(k_cache, v_cache, k * 2, k + 1, loc)
        return k_cache[loc] + 1

    options = {"cudagraphs": "full", "lower_stores": lower}
    compiled, mapping = torch.compile(forward, backend="swa", options=options), make_mapping()
    keep = []
    with torch.no_grad(), swa_compile.collect() as reports:
        for seed in range(5):
            torch.manual_seed(seed)
            caches = [torch.randn(ROWS, HEADS, DIM) for _ in "kv"]
            want = [cache.clone() for cache in caches]
            loc, k = torch.randperm(20)[:4] + 50, torch.randn(4, HEADS, DIM)
            expected = forward(*want, mapping, loc, k)
            torch.testing.assert_close(compiled(*caches, mapping, loc, k), expected)
            assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True))
            keep.append((caches, loc, k))
    assert reports[0].captures.replays == 4


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "piecewise"])
def test_a_trace_names_what_is_replayed(on_cpu, mode):
    _, compiled, _, _ = run(decode, [4] * 6, cudagraphs=mode)
    with torch.no_grad(), torch.profiler.profile() as profile:
        compiled(*decode(4, 9))
    names = [event.name for event in profile.events() if event.name.startswith("swa ")]
    if mode == "full":
        assert names == ["swa whole call, 4 tokens"]
    else:
        pieces = [f"swa piece {i}, 4 tokens" for i in range(LAYERS + 1)]
        assert names[::2] == pieces
        assert names[1::2] == ["swa attention, 4 tokens"] * LAYERS
