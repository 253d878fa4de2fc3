"""Paged attention against a loop over queries, heads and keys in NumPy."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from swa_compile import ops
from swa_compile.ops import attention_gather, attention_reference, attention_sdpa
from swa_compile.ops.attention_choice import attention_kernel
from swa_compile.ops.attention_gather import attention_on_gpu
from swa_compile.ops.attention_reference import Keys
from swa_compile.ops.attention_sdpa import attend_by_sdpa

ROWS = 48


def oracle(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, **options):
    page_size = options.get("page_size", 1)
    window, softcap = options.get("window"), options.get("softcap", 0.0)
    sinks = options.get("sinks")
    scale = options.get("scale") or q.shape[2] ** -0.5
    q, k_cache, v_cache = (t.double().numpy() for t in (q, k_cache, v_cache))
    group = q.shape[1] // k_cache.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v_cache.shape[2]))
    for b in range(len(seq_lens)):
        first, end, length = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]), int(seq_lens[b])
        if length == 0:
            continue
        for row in range(first, end):
            at = length - (end - first) + row - first
            low = 0 if window is None else max(0, at - window + 1)
            slots = [
                int(page_table[b, t // page_size]) * page_size + t % page_size
                for t in range(low, at + 1)
            ]
            for head in range(q.shape[1]):
                scores = [k_cache[s, head // group] @ q[row, head] * scale for s in slots]
                if softcap:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else math.exp(sinks[head]))
                values = np.stack([v_cache[s, head // group] for s in slots])
                out[row, head] = weights @ values / total
    return torch.from_numpy(out).float()


def form_for_gpus(
    q, k_cache, v_cache, table, lens, cu, *, rule=attention_reference.attend, **options
):
    """The gather as it runs on a GPU, which any device can run; tests/gpu runs it there."""
    keys = Keys(
        k_cache,
        v_cache,
        table,
        options.get("page_size", 1),
        options.get("window"),
        options.get("scale") or q.shape[2] ** -0.5,
        options.get("softcap", 0.0),
        options.get("sinks"),
        rule,
    )
    return attention_on_gpu(q, keys, lens, cu)


def batch(new, lens, *, page_size=1, heads=(4, 2), dims=(8, 8), extra=0, index=torch.int32):
    """A call: new tokens and lengths per request, live slots scattered over the caches.

    What no query may read is poisoned: NaN in unused rows (the sink among them), and ids that no
    cache has in table entries past a request's end.
    """
    generator = torch.Generator().manual_seed(3)
    pages = ROWS // page_size
    order = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
    width = max((-(-length // page_size) for length in lens), default=0) + 2
    table = torch.full((len(lens), width), 10**6, dtype=index)
    live = torch.zeros(ROWS, dtype=torch.bool)
    for b, length in enumerate(lens):
        for p in range(-(-length // page_size)):
            page = order.pop()
            table[b, p] = page
            live[page * page_size : page * page_size + min(page_size, length - p * page_size)] = (
                True
            )
    count = sum(new) + extra
    q = torch.randn(count, heads[0], dims[0], generator=generator)
    k_cache = torch.randn(ROWS, heads[1], dims[0], generator=generator)
    v_cache = torch.randn(ROWS, heads[1], dims[1], generator=generator)
    k_cache[~live], v_cache[~live] = torch.nan, torch.nan
    cu = torch.tensor([0, *np.cumsum(new)], dtype=index)
    return q, k_cache, v_cache, table, torch.tensor(lens, dtype=index), cu


BATCHES = {
    "decode": ([1, 1, 1], [5, 1, 9]),
    "prefill": ([4, 1, 7], [4, 1, 7]),
    "extend": ([3, 1, 2], [8, 6, 9]),
    "one": ([1], [4]),
    "with an empty request": ([1, 0, 0, 2], [3, 0, 4, 5]),
    "with a padded request": ([1, 2, 1], [3, 0, 4]),
    "nothing": ([0], [0]),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window beyond all": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"window": 4, "softcap": 5.0, "scale": 0.5, "sinks": torch.arange(4.0)},
}


@pytest.mark.parametrize("new_and_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kernel", ["default", "sdpa", "reference"])
def test_values_are_the_oracles(new_and_lens, options, page_size, kernel):
    args = batch(*new_and_lens, page_size=page_size)
    if kernel == "sdpa" and "softcap" in options:
        kernel = "default"  # SDPA has no softcap: test_attention_choice.py
    with nullcontext() if kernel == "default" else attention_kernel(kernel):
        got = ops.paged_attention(*args, page_size=page_size, **options)
    torch.testing.assert_close(got, oracle(*args, page_size=page_size, **options))


@pytest.mark.parametrize("new_and_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_form_for_gpus_gives_the_same(new_and_lens, options):
    args = batch(*new_and_lens, page_size=4, extra=2)
    rules = [attention_reference.attend]
    if "softcap" not in options:
        rules.append(attend_by_sdpa)
    for rule in rules:
        got = form_for_gpus(*args, page_size=4, rule=rule, **options)
        torch.testing.assert_close(got, oracle(*args, page_size=4, **options))


def test_long_forms_run_in_blocks(monkeypatch):
    monkeypatch.setattr(attention_gather, "_CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(attention_gather, "_GROUP_ELEMENTS", 64)
    monkeypatch.setattr(attention_gather, "_QUERY_BLOCK", 2)
    for new_and_lens in BATCHES.values():
        args = batch(*new_and_lens)
        for window in (None, 3):
            got = ops.paged_attention(*args, window=window)
            torch.testing.assert_close(got, oracle(*args, window=window))


@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (8, 8)), ((6, 2), (4, 12)), ((3, 1), (8, 2))])
def test_head_ratios_and_value_dims(heads, dims):
    args = batch([2, 1], [6, 4], heads=heads, dims=dims)
    got = ops.paged_attention(*args)
    assert got.shape == (3, heads[0], dims[1])
    torch.testing.assert_close(got, oracle(*args))


def test_rows_past_the_last_query_are_zero():
    args = batch([1, 2], [3, 5], extra=3)
    got = ops.paged_attention(*args, sinks=torch.ones(4))
    assert not got[3:].any()
    torch.testing.assert_close(got, oracle(*args, sinks=torch.ones(4)))


@pytest.mark.parametrize("new_and_lens", [([1, 1], [9, 7]), ([3, 2], [9, 7])])
@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_keys_left_of_the_window_are_never_read(new_and_lens, form):
    window, page_size = 3, 2
    args = batch(*new_and_lens, page_size=page_size)
    q, k_cache, v_cache, table, lens, _ = args
    want = oracle(*args, page_size=page_size, window=window)
    for b, new in enumerate(new_and_lens[0]):
        low = int(lens[b]) - new - window + 1
        for t in range(low):
            slot = int(table[b, t // page_size]) * page_size + t % page_size
            k_cache[slot], v_cache[slot] = torch.nan, torch.nan
        for p in range(low // page_size):
            table[b, p] = -1 if p % 2 else 10**6
    run = form_for_gpus if form == "gpu" else ops.paged_attention
    torch.testing.assert_close(run(*args, page_size=page_size, window=window), want)
    assert not q.isnan().any()


def test_table_of_evicted_entries_reads_the_sink_for_nobody():
    args = batch([1], [6])
    want = oracle(*args, window=2)
    args[3][0, :4] = 0
    torch.testing.assert_close(ops.paged_attention(*args, window=2), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_has_the_dtype_of_q_and_is_computed_in_float32(dtype):
    q, k_cache, v_cache, *rest = batch([2, 1], [6, 4])
    q, k_cache, v_cache = q.to(dtype), k_cache.to(dtype), v_cache.to(dtype)
    got = ops.paged_attention(q, k_cache, v_cache, *rest)
    assert got.dtype is dtype
    torch.testing.assert_close(got, oracle(q, k_cache, v_cache, *rest).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches_are_read_as_they_are(dtype):
    q, k_cache, v_cache, *rest = batch([2, 1], [6, 4])
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    got = ops.paged_attention(q, k_cache, v_cache, *rest)
    torch.testing.assert_close(got, oracle(q, k_cache.float(), v_cache.float(), *rest))


def test_defaults_of_dtype_and_device_do_not_matter():
    args = batch([2, 1], [6, 4])
    want = oracle(*args)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        got = ops.paged_attention(*args)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_inputs_that_require_gradients_give_a_result_without(kernel):
    q, k_cache, v_cache, *rest = batch([2, 1], [6, 4])
    sinks = torch.nn.Parameter(torch.ones(4))
    want = oracle(q, k_cache, v_cache, *rest, sinks=sinks.detach())
    with attention_kernel(kernel):
        got = torch.ops.swa.paged_attention(
            q.clone().requires_grad_(), k_cache, v_cache, *rest, sinks=sinks
        )
    torch.testing.assert_close(got.detach(), want)


def test_large_scores_do_not_overflow():
    q, k_cache, v_cache, *rest = batch([1], [4])
    got = ops.paged_attention(q * 1e4, k_cache, v_cache, *rest, sinks=torch.full((4,), 50.0))
    assert got.isfinite().all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_strided_inputs(index):
    q, k_cache, v_cache, *rest = batch([2, 1], [6, 4], index=index)
    want = oracle(q, k_cache, v_cache, *rest)
    q = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    both = torch.stack([k_cache, v_cache], dim=1)
    rest[0] = rest[0].repeat_interleave(2, dim=1)[:, ::2]
    torch.testing.assert_close(ops.paged_attention(q, both[:, 0], both[:, 1], *rest), want)


# Errors


def wrong():
    q, k_cache, v_cache, table, lens, cu = batch([2, 1], [6, 4])
    yield TypeError, "'q' must be floating-point, got int64", {"q": q.long()}
    yield TypeError, "'v_cache' must be floating-point, got int64", {"v_cache": v_cache.long()}
    yield TypeError, "'page_table' must be int32 or int64, got float32", {"page_table": table / 1}
    yield TypeError, "'seq_lens' must be int32 or int64, got int16", {"seq_lens": lens.short()}
    shape = r"got shape \[3, 32\]"
    yield ValueError, rf"'q' must be 3-D \[N, H_q, D\], {shape}", {"q": q.flatten(1)}
    shape = r"got shape \[8\]"
    yield ValueError, rf"'page_table' must be 2-D \[B, P\], {shape}", {"page_table": table[0]}
    message = r"'k_cache' must have the head dimension of 'q': got \[48, 2, 7\] for \[3, 4, 8\]"
    yield ValueError, message, {"k_cache": k_cache[..., :7]}
    message = r"'v_cache' must have the heads of 'k_cache': got \[48, 1, 8\] for \[48, 2, 8\]"
    yield ValueError, message, {"v_cache": v_cache[:, :1]}
    message = (
        r"'q' must have a multiple of the heads of 'k_cache': got \[3, 3, 8\] for \[48, 2, 8\]"
    )
    yield ValueError, message, {"q": q[:, :3]}
    message = "'seq_lens' must have one length per row of 'page_table': got 1 for 2 rows"
    yield ValueError, message, {"seq_lens": lens[:1]}
    message = "'cu_seqlens_q' must have one entry more than 'page_table' has rows: got 2 for 2 rows"
    yield ValueError, message, {"cu_seqlens_q": cu[:2]}
    yield ValueError, "'page_size' must be at least 1, got 0", {"page_size": 0}
    yield ValueError, "'window' must be at least 1, got 0", {"window": 0}
    yield ValueError, "'softcap' must be 0 or greater, got -1.0", {"softcap": -1.0}
    message = r"'sinks' must have one logit per head of 'q': got \[3\] for \[3, 4, 8\]"
    yield ValueError, message, {"sinks": torch.zeros(3)}


NAMES = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q")


@pytest.mark.parametrize(("error", "message", "changes"), list(wrong()))
def test_wrong_input_is_the_same_error_eager_and_fake(error, message, changes):
    args = dict(zip(NAMES, batch([2, 1], [6, 4]), strict=True)) | changes
    pattern = f"^swa::paged_attention: argument {message}$"
    with pytest.raises(error, match=pattern):
        ops.paged_attention(**args)
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(a) if torch.is_tensor(a) else a for n, a in args.items()}
        with pytest.raises(error, match=pattern):
            ops.paged_attention(**fake)


@pytest.mark.parametrize("entry", [-1, ROWS, 2**31 - 1])
def test_live_key_outside_the_caches_is_an_error(entry):
    args = batch([2, 1], [6, 4])
    args[3][1, 3] = entry
    with pytest.raises(ValueError, match=f"'page_table' holds {entry} for page 3 of request 1"):
        ops.paged_attention(*args)


def test_page_id_whose_first_row_wraps_around_is_an_error():
    args = batch([2, 1], [6, 4], page_size=4, index=torch.int64)
    args[3][1, 0] = 2**62
    with pytest.raises(ValueError, match=f"'page_table' holds {2**62} for page 0 of request 1"):
        ops.paged_attention(*args, page_size=4)


def test_requests_that_see_equally_many_keys_are_attended_to_together(monkeypatch):
    shapes = []

    def counted(q, k, v, **options):
        shapes.append((k.shape[0], k.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(attention_sdpa, "scaled_dot_product_attention", counted)
    args = batch([1, 1, 2, 1, 1], [9, 3, 8, 7, 2])
    got = ops.paged_attention(*args, window=5)
    assert sorted(shapes) == [(1, 2), (1, 3), (1, 6), (2, 5)]
    torch.testing.assert_close(got, oracle(*args, window=5))


def test_page_that_ends_past_the_caches_is_live_up_to_their_end():
    q, k_cache, v_cache, table, lens, cu = batch([1], [6], page_size=4)
    table[0, 1] = 11
    k_cache[44:46], v_cache[44:46] = 1.0, 2.0
    want = oracle(q, k_cache, v_cache, table, lens, cu, page_size=4)
    short = k_cache[:46], v_cache[:46]
    torch.testing.assert_close(ops.paged_attention(q, *short, table, lens, cu, page_size=4), want)
    with pytest.raises(ValueError, match="the caches have 45 rows"):
        ops.paged_attention(q, k_cache[:45], v_cache, table, lens, cu, page_size=4)


@pytest.mark.parametrize("cu", [[1, 2, 3], [0, 2, 1], [0, 2, 4]])
def test_query_offsets_that_contradict_themselves_are_an_error(cu):
    args = batch([2, 1], [6, 4])[:5]
    with pytest.raises(ValueError, match=r"'cu_seqlens_q' must rise from 0 to at most 3"):
        ops.paged_attention(*args, torch.tensor(cu))


@pytest.mark.parametrize("lens", [[1, 4], [6, -1], [6, 9]])
def test_lengths_that_contradict_the_rest_are_an_error(lens):
    args = batch([2, 1], [6, 4])
    with pytest.raises(ValueError, match=r"'seq_lens' holds -?\d for request \d"):
        ops.paged_attention(*args[:4], torch.tensor(lens), args[5])


def test_lengths_are_checked_against_a_table_without_pages():
    q, k_cache, v_cache, table, lens, cu = batch([1], [4])
    with pytest.raises(ValueError, match=r"holds 4 for request 0, .* a page table for 0$"):
        ops.paged_attention(q, k_cache, v_cache, table[:, :0], lens, cu)
    assert not ops.paged_attention(q, k_cache, v_cache, table[:, :0], lens * 0, cu).any()


def test_no_requests_give_zeros():
    q, k_cache, v_cache, table, lens, cu = batch([1], [4])
    assert not ops.paged_attention(q, k_cache, v_cache, table[:0], lens[:0], cu[:1]).any()


# Tracing


@pytest.mark.parametrize("new_and_lens", [BATCHES[n] for n in ("decode", "extend", "nothing")])
@pytest.mark.parametrize("options", [OPTIONS[n] for n in ("plain", "all")])
def test_opcheck(new_and_lens, options):
    args = batch(*new_and_lens, page_size=4)
    torch.library.opcheck(torch.ops.swa.paged_attention.default, args, {"page_size": 4, **options})


def test_opcheck_of_strided_inputs():
    q, k_cache, v_cache, *rest = batch([2, 1], [6, 4])
    q = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    both = torch.stack([k_cache, v_cache], dim=1)
    args = (q, both[:, 0], both[:, 1], *rest)
    torch.library.opcheck(torch.ops.swa.paged_attention.default, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_agrees_with_eager(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        ops.paged_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for name in ("decode", "extend", "one"):
        args = batch(*BATCHES[name])
        got, want = compiled(*args, window=3), ops.paged_attention(*args, window=3)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_number_of_queries_and_requests_stays_dynamic():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(ops.paged_attention, backend=counter, fullgraph=True)
    for name in ("decode", "extend", "with an empty request", "one"):
        args = batch(*BATCHES[name])
        for i in (0, 3, 4, 5):
            torch._dynamo.decorators.mark_unbacked(args[i], 0)
        torch._dynamo.decorators.mark_unbacked(args[3], 1)
        torch.testing.assert_close(compiled(*args), oracle(*args))
    assert counter.frame_count == 1
