"""The Triton kernels: on a GPU where there is one, else through Triton's interpreter.

What they give is compared with the references, which other tests compare with NumPy; values are
such that no conversion rounds, since the interpreter rounds unlike a GPU.
"""

import pytest
import torch

from swa_compile import ops
from swa_compile.ops import store as store_module

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


MAPPING = torch.tensor([0, 5, 2, 9, 7, 3, -1, 4, 0, 11, -1])
PAGES = torch.tensor([0, 2, -1, 5, 1])
RULES = {
    "translate_loc": (MAPPING, [-1, 0, 3, 10, 9, 6], ()),
    "translate_page_table": (MAPPING, [-1, 0, 3, 2, 1, 3], (3,)),
    "translate_paged_loc": (PAGES, [-1, 0, 3, 7, 19, 20, 10**12], (4,)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["vector", "permuted", "sliced", "empty", "0-d", "many blocks"])
def test_translation_agrees_with_the_reference(kernels, rule, dtype, layout):
    mapping, ids, size = RULES[rule]
    if dtype is torch.int32:
        ids = [i for i in ids if i < 2**31]
    ids = torch.tensor(ids, dtype=dtype)
    ids = {
        "vector": lambda: ids,
        "permuted": lambda: torch.stack([ids, ids.flip(0)]).t(),
        "sliced": lambda: ids.repeat_interleave(2)[::2],
        "empty": lambda: ids[:0],
        "0-d": lambda: ids[2],
        "many blocks": lambda: ids.repeat(300),
    }[layout]()
    translate = kernels("translate_triton").translate
    got = translate(rule, mapping.to(DEVICE), ids.to(DEVICE), *size)
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), getattr(ops, rule)(mapping, ids, *size))


@pytest.mark.parametrize("rule", RULES)
def test_translation_reads_a_strided_mapping(kernels, rule):
    mapping, ids, size = RULES[rule]
    wide = torch.stack([mapping, mapping + 100], dim=1).to(DEVICE)
    got = kernels("translate_triton").translate(
        rule, wide[:, 0], torch.tensor(ids).to(DEVICE), *size
    )
    assert torch.equal(got.cpu(), getattr(ops, rule)(mapping, torch.tensor(ids), *size))


@pytest.mark.skipif(ON_GPU, reason="stops the device, which no later test survives")
@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        ("translate_loc", 11),
        ("translate_loc", 2**63 - 1),
        ("translate_page_table", 4),
        ("translate_page_table", 2**62),  # times the page size it wraps around
        ("translate_page_table", 2**63 - 1),
    ],
)
def test_translation_reads_nothing_out_of_bounds(kernels, rule, bad):
    mapping, _, size = RULES[rule]
    got = kernels("translate_triton").translate(rule, mapping, torch.tensor([bad, -9]), *size)
    assert got.tolist() == [-1, -1]


def store_both(kernels, caches, rows, loc, scales=(None, None)):
    """What the kernel and what the reference leave in the allocations behind `caches`."""
    found = []
    for run in ("triton", "reference"):
        bases = [torch.empty(0, dtype=c.dtype).set_(c.untyped_storage()).clone() for c in caches]
        shared = caches[0].untyped_storage().data_ptr() == caches[-1].untyped_storage().data_ptr()
        if shared:
            bases = [bases[0]] * len(bases)
        device = DEVICE if run == "triton" else "cpu"
        bases = [bases[0].to(device)] * len(bases) if shared else [b.to(device) for b in bases]
        views = [
            base.as_strided(c.shape, c.stride(), c.storage_offset())
            for base, c in zip(bases, caches, strict=True)
        ]
        given = [
            (view, row.to(device), None if scale is None else scale.to(device))
            for view, row, scale in zip(views, rows, scales, strict=False)
        ]
        if run == "triton":
            kernels("store_triton").store(given, loc.to(device))
        else:
            for view, row, scale in given:
                values = store_module.as_cache_dtype(row, view.dtype, scale)
                store_module.reference_store(view, values, loc.long())
        found.append([base.cpu().float() for base in bases])
    return found


def numbers(*shape):
    """Small integers: exact in every dtype, and in float8 after a division by a power of two."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float()


CACHES = {
    "apart": (torch.zeros(7, 2, 3), torch.zeros(7, 2, 5)),
    "heads and dims differ": (torch.zeros(7, 4, 3), torch.zeros(9, 1, 6)),
    "layers of a stack": torch.zeros(3, 7, 2, 3)[1:].unbind(0),
    "halves of each row": torch.zeros(7, 2, 2, 3).unbind(1),
    "permuted": torch.zeros(2, 3, 2, 7).permute(0, 3, 2, 1).unbind(0),
    "wide": (torch.zeros(7, 5, 300), torch.zeros(7, 3, 7)),
    "rank 2": (torch.zeros(7, 6), torch.zeros(7, 4)),
    "rank 1": (torch.zeros(7), torch.zeros(7)),
    "one": (torch.zeros(7, 1, 6),),
}


@pytest.mark.parametrize("caches", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("loc", [[3, -1, 6, 1], [], [5]])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store_agrees_with_the_reference(kernels, caches, loc, index):
    rows = [numbers(len(loc), *cache.shape[1:]) for cache in caches]
    got, want = store_both(kernels, caches, rows, torch.tensor(loc, dtype=index))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_store_reads_strided_rows_and_ids(kernels):
    caches = CACHES["layers of a stack"]
    qkv = numbers(3, 18)
    k = qkv[:, 6:12].unflatten(1, (2, 3))
    v = numbers(3, 2, 3).permute(2, 1, 0)
    got, want = store_both(kernels, caches, [k, v], torch.tensor([2, 9, 4, 9, 6, 9])[::2])
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store_casts(kernels, dtype):
    caches = [cache.to(dtype) for cache in CACHES["apart"]]
    rows = [numbers(2, *cache.shape[1:]) for cache in caches]
    got, want = store_both(kernels, caches, rows, torch.tensor([4, 2]))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scaled", [(True, True), (False, True), (False, False)])
def test_store_scales_and_saturates(kernels, dtype, scaled):
    caches = [cache.to(dtype) for cache in CACHES["apart"]]
    rows = [numbers(2, *cache.shape[1:]) for cache in caches]
    # The interpreter makes a finite number of NaN.
    rows[0][0, 0] = torch.tensor([1e6, -1e6, torch.nan if ON_GPU else 0.0])
    scales = [torch.tensor(0.5) if on else None for on in scaled]
    got, want = store_both(kernels, caches, rows, torch.tensor([4, 2]), scales)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(99), b.nan_to_num(99))
    assert got[0].view(7, 2, 3)[4, 0, :2].tolist() == [
        torch.finfo(dtype).max,
        torch.finfo(dtype).min,
    ]


@pytest.mark.skipif(ON_GPU, reason="stops the device, which no later test survives")
def test_store_writes_nothing_for_ids_out_of_range(kernels):
    caches = [torch.zeros(7, 2, 3), torch.zeros(7, 2, 3)]
    rows = [torch.ones(4, 2, 3)] * 2
    loc = torch.tensor([7, -2, 2**40, 3])
    kernels("store_triton").store([(c, r, None) for c, r in zip(caches, rows, strict=True)], loc)
    for cache in caches:
        assert cache.nonzero()[:, 0].unique().tolist() == [3]


def test_store_offsets_have_64_bits(kernels):
    """Row 3 of a cache whose rows lie 2^30 apart: element 3 * 2^30, past 2^31."""
    step = 2**30
    # Without a GPU this is virtual memory, of which two pages are touched.
    memory = torch.empty(3 * step + 8, dtype=torch.uint8, device=DEVICE)
    cache = memory.as_strided((4, 8), (step, 1))
    row = torch.arange(8, dtype=torch.uint8, device=DEVICE)
    loc = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    store = kernels("store_triton").store
    store([(cache, row[None], None)], loc)
    assert torch.equal(cache[3], row)


def test_unsupported_caches_are_named_by_supports(kernels):
    supports = kernels("store_triton").supports
    assert supports(torch.zeros(4, 2, 3, device=DEVICE))
    assert not supports(torch.zeros(4, 1, 2, 3, device=DEVICE))
    assert not supports(torch.zeros(4, 2).to(torch.float8_e4m3fnuz).to(DEVICE))
