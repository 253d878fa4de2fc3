"""Runs every Triton kernel of the package once or twice, for compute-sanitizer to watch.

A program of its own: under the sanitizer each allocation should be the driver's, so that one
element past the end of a tensor is outside of what is allocated.
"""

import torch

import swa_compile
from swa_compile import ops

FULL, ROWS, PAGE, HEADS, KV_HEADS, DIM = 300, 40, 4, 4, 2, 64


def ids(*shape, below=ROWS):
    return torch.randint(1, below, shape, device="cuda")


def translations():
    mapping = torch.cat([ids(FULL + PAGE), ids(1) * 0 - 1])
    for dtype in (torch.int32, torch.int64):
        loc = torch.randint(-1, FULL, (7, 33), device="cuda").to(dtype)
        ops.translate_loc(mapping, loc.t())
        ops.translate_page_table(mapping, (loc // PAGE)[:, ::3], PAGE)
        ops.translate_paged_loc(torch.randint(-1, 9, (FULL // PAGE,), device="cuda"), loc, PAGE)


def stores():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        caches = [torch.zeros(ROWS, KV_HEADS, dim, device="cuda").to(dtype) for dim in (DIM, 24)]
        rows = [torch.randn(13, KV_HEADS, dim, device="cuda").bfloat16() for dim in (DIM, 24)]
        loc = torch.randperm(ROWS - 1, device="cuda")[:13] + 1
        ops.store_kv(*caches, *rows, loc)


def attention():
    for new, lens in (([1] * 3, [1, 17, 900]), ([1], [3000]), ([3, 0, 70], [3, 0, 200])):
        for page, window, dtype in ((1, None, torch.bfloat16), (16, 20, torch.float8_e4m3fn)):
            columns = -(-max(lens) // page)
            table = torch.full((len(lens), columns), 2**30, dtype=torch.int32, device="cuda")
            for request, length in enumerate(lens):
                used = -(-length // page)
                table[request, :used] = ids(used, below=9).int()
            caches = [torch.randn(9 * page, KV_HEADS, DIM, device="cuda").to(dtype) for _ in "kv"]
            starts = torch.tensor([0, *new]).cumsum(0).int().cuda()
            q = torch.randn(sum(new), HEADS, DIM, device="cuda").bfloat16()
            lengths = torch.tensor(lens, dtype=torch.int32).cuda()
            ops.paged_attention(
                q, *caches, table, lengths, starts, page_size=page, window=window, softcap=20.0,
                sinks=torch.randn(HEADS, device="cuda"),
            )  # fmt: skip


def rows():
    def forward(q, k, v, weight, mapping, loc, k_cache, v_cache):
        own = ops.translate_loc(mapping, loc)
        k = torch.nn.functional.rms_norm(k, (DIM,), weight, 1e-6)
        ops.store_kv(k_cache, v_cache, k, v * 2, own)
        return torch.nn.functional.rms_norm(q, (DIM,), weight, 1e-6)

    mapping = torch.cat([ids(FULL), ids(1) * 0 - 1])
    mapping[200:219] = torch.randperm(19, device="cuda") + 1
    caches = [torch.zeros(ROWS, KV_HEADS, DIM, device="cuda") for _ in "kv"]
    q = torch.randn(19, HEADS, DIM, device="cuda").bfloat16()
    k, v = (torch.randn(19, KV_HEADS, DIM, device="cuda").bfloat16() for _ in "kv")
    weight = torch.randn(DIM, device="cuda").bfloat16()
    loc = torch.arange(200, 219, device="cuda")
    with torch.no_grad(), swa_compile.collect() as reports:
        torch.compile(forward, backend="swa_eager")(q, k, v, weight, mapping, loc, *caches)
    assert [report.rows_fused for report in reports] == [1]


if __name__ == "__main__":
    torch.manual_seed(0)
    for run in (translations, stores, attention, rows):
        run()
        torch.cuda.synchronize()
    print("all kernels ran")
