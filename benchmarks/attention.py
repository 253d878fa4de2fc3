"""Attention kernels: time, bytes of live keys and values per second, and host time per call.

    python benchmarks/attention.py                     # all shapes; a table, and JSON with --json
    python benchmarks/attention.py --quick             # the shapes of a decode step, in a minute
    python benchmarks/attention.py --sweep             # sizes of our kernel: the best per shape
    python benchmarks/attention.py --only B64 --kernels triton flashinfer

Each time is the median over replays of a CUDA graph that holds several calls. The calls of a graph
walk through copies of the caches that together exceed the L2 cache, so that none finds its keys
there. Inputs are random. `GB/s` counts the keys and values that queries see, once, and `of copy` is
its share of what a copy of device memory moves, counting both directions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from swa_compile.ops import FlashInferAttention, attention_kernel, paged_attention
from swa_compile.ops.attention_choice import KERNELS

# Graphs hold as many calls as read this many bytes, within these bounds.
_BYTES_PER_GRAPH = 2**31
_CALLS = (2, 24)


@dataclass(frozen=True)
class Shape:
    """A call: `requests` of `context` tokens each, the last `new` of which are queries."""

    requests: int
    context: int
    window: int | None
    heads: int
    kv_heads: int
    dim: int
    page_size: int = 16
    new: int = 1
    cache: str = "bfloat16"
    sinks: bool = False
    softcap: float = 0.0
    ragged: bool = False  # contexts between a half of `context` and all of it

    def __str__(self) -> str:
        extras = [f"{self.heads}/{self.kv_heads}x{self.dim}"]
        extras += ["sinks"] * self.sinks + [f"cap{self.softcap:g}"] * bool(self.softcap)
        new = f"new{self.new}-" * (self.new > 1)
        return (
            f"{new}B{self.requests}-ctx{self.context}-W{self.window or 'all'}-{','.join(extras)}-"
            f"page{self.page_size}-{self.cache.replace('_e4m3fn', '')}{'-ragged' * self.ragged}"
        )


MODELS = {
    "ref24": {"heads": 32, "kv_heads": 8, "dim": 64},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "sinks": True},
    "gemma-3": {"heads": 32, "kv_heads": 16, "dim": 128},
    "gemma-2": {"heads": 8, "kv_heads": 4, "dim": 256, "softcap": 50.0},
}


def shapes(quick: bool) -> Iterator[Shape]:
    """What is measured. The whole is a grid for one model, and the others at fewer points."""
    ref24: dict[str, Any] = MODELS["ref24"]
    if quick:
        for requests, (context, window) in product(
            (1, 64, 256), ((1024, 128), (8192, 1024), (8192, None))
        ):
            yield Shape(requests, context, window, **ref24, page_size=1)
        yield Shape(8, 512, None, **ref24, new=512)
        return
    contexts, windows = (1024, 8192, 32768), (128, 1024, None)
    for requests, context, window in product((1, 16, 64, 256), contexts, windows):
        yield Shape(requests, context, window, **ref24, page_size=1)
    for name, requests, window in product(MODELS, (1, 64), windows):
        model: dict[str, Any] = MODELS[name]
        yield Shape(requests, 8192, window, **model, ragged=True)
    for page_size, requests in product((1, 16, 64), (1, 64)):
        yield Shape(requests, 8192, None, **ref24, page_size=page_size)
    for window, requests in product((1024, None), (1, 64)):
        yield Shape(requests, 8192, window, **ref24, cache="float8_e4m3fn")
    for window, page_size in product((None, 1024), (16, 256)):
        yield Shape(64, 8192, window, **MODELS["gemma-3"], page_size=page_size)  # type: ignore[arg-type]
    for name, window in product(MODELS, (None, 1024)):
        model = MODELS[name]
        yield Shape(1, 4096, window, **model, new=4096)
        yield Shape(8, 512, window, **model, new=512)
        yield Shape(8, 8192, window, **model, new=512, ragged=True)


class Call:
    """The tensors of a shape, with several copies of its caches."""

    def __init__(self, shape: Shape, copies: int) -> None:
        self.shape = shape
        torch.manual_seed(0)
        lens = torch.full((shape.requests,), shape.context)
        if shape.ragged and shape.requests > 1:
            lens = torch.linspace(shape.context / 2, shape.context, shape.requests).long()
        self.host_lens = lens.int()
        self.host_starts = (torch.arange(shape.requests + 1) * shape.new).int()
        columns = -(-shape.context // shape.page_size)
        pages = shape.requests * columns
        rows = (pages + 1) * shape.page_size
        table = torch.randperm(pages, device="cuda") + 1
        self.table = table.view(shape.requests, columns).int()
        self.lens, self.starts = self.host_lens.cuda(), self.host_starts.cuda()
        dtype = getattr(torch, shape.cache)

        def cache() -> Tensor:
            drawn = torch.empty(
                rows, shape.kv_heads, shape.dim, dtype=torch.bfloat16, device="cuda"
            )
            return drawn.normal_().to(dtype)

        self.caches = [(cache(), cache()) for _ in range(copies)]
        tokens = shape.requests * shape.new
        self.q = torch.randn(tokens, shape.heads, shape.dim, device="cuda").bfloat16()
        self.sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None

    def run(self, copy: int = 0) -> Tensor:
        k_cache, v_cache = self.caches[copy]
        shape = self.shape
        return paged_attention(
            self.q,
            k_cache,
            v_cache,
            self.table,
            self.lens,
            self.starts,
            page_size=shape.page_size,
            window=shape.window,
            softcap=shape.softcap,
            sinks=self.sinks,
        )

    @property
    def planned(self) -> FlashInferAttention:
        """FlashInfer with a plan for this call."""
        shape = self.shape
        planned = FlashInferAttention(
            tokens=self.q.shape[0],
            requests=shape.requests,
            pages=max(self.table.numel(), self.q.shape[0]),
            device="cuda",
        )
        planned.plan(self.host_lens, self.host_starts)
        return planned


def bytes_of(shape: Shape) -> int:
    """Bytes of the keys and values that queries see, each once."""
    lens = torch.full((shape.requests,), shape.context)
    if shape.ragged and shape.requests > 1:
        lens = torch.linspace(shape.context / 2, shape.context, shape.requests).long()
    seen = lens if shape.window is None else lens.clamp_max(shape.window + shape.new - 1)
    itemsize = getattr(torch, shape.cache).itemsize
    return int(seen.sum()) * shape.kv_heads * shape.dim * 2 * itemsize


def products_of(shape: Shape) -> float:
    """Floating-point operations of both products, for the keys that each query sees."""
    at = torch.arange(shape.context - shape.new, shape.context) + 1
    seen = at if shape.window is None else at.clamp_max(shape.window)
    return 4.0 * float(seen.sum()) * shape.requests * shape.heads * shape.dim


def copies_for(shape: Shape) -> int:
    """Copies of the caches, so that together they exceed the L2 cache three times."""
    whole = shape.requests * shape.context * shape.kv_heads * shape.dim * 4
    properties = torch.cuda.get_device_properties(0)
    needed = -(-3 * properties.L2_cache_size // max(1, bytes_of(shape)))
    room = int(0.6 * properties.total_memory) // max(1, whole)
    return max(1, min(needed, room, _CALLS[1]))


def graph_time(run: Callable[[int], object], copies: int, calls: int, repeats: int) -> list[float]:
    """Microseconds per call, one figure per replay of a graph of `calls` calls."""
    for copy in range(min(copies, 2)):
        run(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(i % copies) for i in range(calls)]
    for _ in range(3):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept
    return [begin.elapsed_time(end) * 1000 / calls for begin, end in events]


def host_time(run: Callable[[int], object]) -> float:
    """Microseconds that the host takes to issue a call: the median over short bursts."""
    spent = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            run(0)
        spent.append((time.perf_counter() - begin) * 1e5)
    torch.cuda.synchronize()
    return statistics.median(spent)


def copy_rate() -> float:
    """Bytes per second that a copy of device memory moves, both directions counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = graph_time(lambda copy: target.copy_(source), 1, 4, 50)
    return 2 * source.numel() / statistics.median(times) * 1e6


def measure(shape: Shape, names: list[str], repeats: int, copy: float) -> list[dict[str, Any]]:
    """A row per kernel that can compute the shape, or the reason why it cannot."""
    copies = copies_for(shape)
    call = Call(shape, copies)
    calls = max(_CALLS[0], min(_CALLS[1], _BYTES_PER_GRAPH // max(1, bytes_of(shape))))
    rows = []
    for name in names:
        row: dict[str, Any] = {"shape": str(shape), **asdict(shape), "kernel": name}
        rows.append(row)
        reason = KERNELS[name].missing(torch.device("cuda", torch.cuda.current_device()))
        # A gather of everything, per query: it would not fit, or take minutes.
        if reason is None and name in ("sdpa", "reference"):
            gathered = call.q.shape[0] * shape.context * shape.kv_heads * shape.dim
            if gathered > 2**31:
                reason = "the gather is too large"
        if reason is not None:
            row["skipped"] = reason
            continue
        try:
            with ExitStack() as stack:
                stack.enter_context(_asked(name, call))
                times = graph_time(call.run, copies, calls, repeats)
                row["host_us"] = host_time(call.run)
        except ValueError as error:
            row["skipped"] = str(error).partition("this call: ")[2] or str(error)
            continue
        except torch.OutOfMemoryError:
            row["skipped"] = "out of memory"
            continue
        median = statistics.median(times)
        low, high = statistics.quantiles(times, n=10)[0], statistics.quantiles(times, n=10)[-1]
        row |= {
            "us": median,
            "us_p10": low,
            "us_p90": high,
            "GB/s": bytes_of(shape) / median / 1e3,
            "of_copy": bytes_of(shape) / median * 1e6 / copy,
            "TFLOP/s": products_of(shape) / median / 1e6,
        }
    return rows


def _asked(name: str, call: Call) -> AbstractContextManager[None]:
    return attention_kernel(call.planned if name == "flashinfer" else name)


def sweep(shape: Shape, repeats: int) -> list[dict[str, Any]]:
    """Sizes of our kernel, the fastest first; "chosen" marks what it takes by itself."""
    from swa_compile.ops import attention_launch, attention_tuning
    from swa_compile.ops.attention_reference import Keys

    copies = copies_for(shape)
    call = Call(shape, copies)
    calls = max(_CALLS[0], min(_CALLS[1], _BYTES_PER_GRAPH // max(1, bytes_of(shape))))
    out = torch.empty_like(call.q)
    device = attention_tuning.device_of(call.q.device)
    dtype = getattr(torch, shape.cache)
    chosen = attention_tuning.tuning_for(
        call.q.shape[0],
        shape.requests,
        shape.kv_heads,
        shape.heads // shape.kv_heads,
        (shape.dim, shape.dim),
        max(2, dtype.itemsize),
        shape.page_size,
        call.table.shape[1] * shape.page_size,
        shape.window,
        device,
    )
    least = max(16, shape.heads // shape.kv_heads)
    rows_of = (least,) if shape.new == 1 else (64, 128)
    found: list[dict[str, Any]] = []

    def measured(tuning: attention_tuning.Tuning) -> float:
        def run(copy: int) -> None:
            keys = Keys(
                *call.caches[copy],
                call.table,
                shape.page_size,
                shape.window,
                shape.dim**-0.5,
                shape.softcap,
                call.sinks,
            )
            attention_launch.attention(call.q, keys, call.lens, call.starts, out, tuning)

        try:
            median = statistics.median(graph_time(run, copies, calls, repeats))
        except Exception as error:  # too much shared memory, or not compilable: noted, and on
            torch.cuda.synchronize()
            found.append({**asdict(tuning), "failed": f"{type(error).__name__}: {error}"[:200]})
            return float("inf")
        found.append({**asdict(tuning), "us": median, "chosen": tuning == chosen})
        return median

    tiles: dict[attention_tuning.Tuning, float] = {}
    for rows, keys, warps, depth in product(rows_of, (32, 64, 128), (2, 4, 8), (1, 2, 3)):
        tuning = replace(chosen, rows=rows, keys=keys, warps=warps, depth=depth)
        tiles[tuning] = measured(tuning)
    best = min(tiles, key=lambda tuning: tiles[tuning])
    for splits in (1, 2, 4, 8, 16, 32, 64) if shape.new == 1 else (1, 2, 4):
        if splits != best.splits:
            measured(replace(best, splits=splits))
    found.sort(key=lambda row: row.get("us", float("inf")))
    return [{"shape": str(shape), **row} for row in found]


def _print_row(row: dict[str, Any]) -> None:
    head = f"{row['shape']:<54} {row['kernel']:<11}"
    if "skipped" in row:
        print(f"{head} {'-':>9}  {row['skipped']}")
    else:
        print(
            f"{head} {row['us']:>9.2f} {row['us_p10']:>9.2f} {row['us_p90']:>9.2f}"
            f" {row['GB/s']:>8.0f} {row['of_copy']:>7.0%} {row['TFLOP/s']:>8.1f}"
            f" {row['host_us']:>7.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few shapes, within a minute")
    parser.add_argument("--sweep", action="store_true", help="try sizes of our kernel")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name has TEXT")
    parser.add_argument("--repeats", type=int, default=50, help="replays per figure (50)")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which to end")
    parser.add_argument("--json", metavar="FILE", help="where to write the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py: needs a CUDA GPU, and torch sees none here")
    begin = time.perf_counter()
    copy = copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; a copy moves {copy / 1e9:.0f} GB/s")
    wanted = [shape for shape in shapes(args.quick) if args.only in str(shape)]
    rows: list[dict[str, Any]] = []
    if not args.sweep:
        print(
            f"{'shape':<54} {'kernel':<11} {'us':>9} {'p10':>9} {'p90':>9} {'GB/s':>8}"
            f" {'of copy':>7} {'TFLOP/s':>8} {'host us':>7}"
        )
    for i, shape in enumerate(wanted):
        if time.perf_counter() - begin > args.limit:
            print(f"{len(wanted) - i} shapes left out after {args.limit:.0f} s")
            break
        if args.sweep:
            found = sweep(shape, args.repeats)
            rows += found
            for row in found[:3] + [row for row in found[3:] if row.get("chosen")]:
                sizes = {k: row[k] for k in ("rows", "keys", "warps", "depth", "splits")}
                mark = "  <- chosen" if row.get("chosen") else ""
                print(f"{row['shape']:<54} {row.get('us', float('nan')):>9.2f} us  {sizes}{mark}")
        else:
            found = measure(shape, args.kernels, args.repeats, copy)
            rows += found
            for row in found:
                _print_row(row)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": name, "torch": torch.__version__, "copy_GB/s": copy / 1e9, "rows": rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
