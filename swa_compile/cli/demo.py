"""`swa-compile demo`: a hybrid model decodes real text, eager and compiled, side by side."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from swa_compile.cli.device import add_device_option, chosen_device
from swa_compile.cli.errors import CheckFailed, UsageError

# Largest difference of a cache element between eager and compiled float32 code that rounding
# explains, relative to a value of 1.
_TOLERANCE = 1e-3


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="decode text with a hybrid model, eager against compiled",
        description="Prefill a text in chunks and decode past the window through a hybrid KV pool, "
        "eager and compiled; compare the tokens and every cache row.",
    )
    parser.add_argument("--text", metavar="FILE", help="text to prefill (default: a short story)")
    parser.add_argument("--layers", type=int, default=12, help="layers, half of them swa")
    parser.add_argument("--window", type=int, default=64, help="keys that an swa layer sees")
    parser.add_argument("--page-size", type=int, default=1, choices=(1, 16, 64))
    add_device_option(parser)
    parser.add_argument("--max-new-tokens", type=int, default=96, help="tokens to decode")
    parser.add_argument("--dump", metavar="DIR", help="folder for the graph dumps")
    return parser


@dataclass
class _Run:
    """One model on one pool, and what it gave."""

    pool: Any
    result: Any
    reports: list[Any] = field(default_factory=list)


def run(args: argparse.Namespace) -> None:
    """Run the demo and print the comparison.

    Raises:
        UsageError: for options that cannot be run.
        CheckFailed: where eager and compiled differ, or more than one translation node is left.
    """
    console = Console(highlight=False)
    device = chosen_device(args.device)
    prompts = _prompts(args)
    if args.dump is not None and Path(args.dump).exists() and not Path(args.dump).is_dir():
        raise UsageError(f"--dump names a folder; {args.dump} is a file")
    if device.type == "cpu":
        # Layers this small are done before a second thread has woken up, eager or compiled.
        torch.set_num_threads(1)
    dump = args.dump or tempfile.mkdtemp(prefix="swa-compile-demo-")
    swa_layers = (args.layers + 1) // 2
    console.print(
        f"{args.layers} layers ({swa_layers} sliding-window, window {args.window}), page size "
        f"{args.page_size}, {len(prompts)} requests of {', '.join(str(len(p)) for p in prompts)} "
        f"tokens, {args.max_new_tokens} new tokens each, on {device}",
        soft_wrap=True,
    )
    eager = _decode(args, device, prompts, console, compiled=False, dump=dump)
    ours = _decode(args, device, prompts, console, compiled=True, dump=dump)
    _show(console, args, eager, ours, dump)


def _decode(
    args: argparse.Namespace,
    device: torch.device,
    prompts: list[list[int]],
    console: Console,
    *,
    compiled: bool,
    dump: str,
) -> _Run:
    import swa_compile
    from swa_compile.kv import HybridKVPool
    from swa_compile.models import HybridConfig, HybridTransformer
    from swa_compile.models.greedy import greedy

    kinds = tuple("swa" if i % 2 == 0 else "full" for i in range(args.layers))
    config = HybridConfig(layers=kinds, window=args.window)
    longest = max(map(len, prompts)) + args.max_new_tokens
    total = sum(len(p) + args.max_new_tokens + args.page_size for p in prompts)
    chunk = max(args.window, args.page_size)
    pool = HybridKVPool(
        config.layer_specs(),
        max_tokens=total,
        max_requests=len(prompts),
        max_context=longest,
        swa_tokens=len(prompts) * (args.window + chunk + 2 * args.page_size),
        page_size=args.page_size,
        device=device,
    )
    torch.manual_seed(0)
    model = HybridTransformer(config, pool).to(device).eval()
    forward: Any = model
    if compiled:
        torch._dynamo.reset()
        forward = torch.compile(
            model, backend="swa", dynamic=True, fullgraph=True, options={"dump_dir": dump}
        )
    title = "compiled" if compiled else "eager"
    work = sum(map(len, prompts)) + len(prompts) * (args.max_new_tokens - 1)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, swa_compile.collect() as reports:
        task = progress.add_task(title, total=work)
        result = greedy(
            forward,
            pool,
            prompts,
            args.max_new_tokens,
            chunk=chunk,
            table_width=-(-longest // args.page_size),
            progress=lambda tokens: progress.advance(task, tokens),
        )
    return _Run(pool, result, reports)


def _show(console: Console, args: argparse.Namespace, eager: _Run, ours: _Run, dump: str) -> None:
    same_tokens = eager.result.tokens == ours.result.tokens
    rows, worst = _compare_caches(eager.pool, ours.pool)
    report = ours.reports[-1] if ours.reports else None

    console.print()
    table = Table(show_header=False, box=None, padding=(0, 2))
    if report is not None:
        table.add_row(
            "translations per forward",
            f"{report.translations_found} -> {report.translation_nodes} "
            f"node{'s' * (report.translation_nodes != 1)}",
        )
        table.add_row("KV stores lowered", f"{report.stores_lowered} of {report.stores_found}")
        table.add_row("cache copies in the code", str(report.cache_copies))
        table.add_row("index computations merged", str(report.invariants_hoisted))
    table.add_row("graphs compiled", str(len(ours.reports)))
    table.add_row("tokens", "equal" if same_tokens else "[red]DIFFERENT[/red]")
    verdict = "equal" if worst <= _TOLERANCE else "[red]DIFFERENT[/red]"
    table.add_row("cache rows", f"{rows} compared, {verdict} (largest difference {worst:.1e})")
    for name, one in (("eager", eager), ("compiled", ours)):
        table.add_row(f"time per token, {name}", _time_per_token(one, len(eager.result.tokens)))
    table.add_row("text of the first request", repr(_text(eager.result.tokens[0])[:40]))
    table.add_row("graph dumps", dump)
    console.print(table)
    console.print()
    for i, graph in enumerate(ours.reports):
        console.print(f"graph {i}: {graph.summary()}", markup=False, soft_wrap=True)

    if not same_tokens:
        raise CheckFailed("the compiled model decoded other tokens than the eager one")
    if worst > _TOLERANCE:
        raise CheckFailed(f"cache rows differ by up to {worst:.1e} (allowed {_TOLERANCE:.0e})")
    if report is None or any(graph.translation_nodes > 1 for graph in ours.reports):
        raise CheckFailed("more than one translation node is left; see the dumps")


def _compare_caches(want: Any, got: Any) -> tuple[int, float]:
    """Rows compared and the largest difference, over every row of every layer but the sink's."""
    rows, worst = 0, 0.0
    for layer in range(len(want.layers)):
        for cache in ("k_cache", "v_cache"):
            a, b = getattr(want, cache)(layer), getattr(got, cache)(layer)
            a, b = a[want.page_size :].float(), b[want.page_size :].float()
            rows += a.shape[0]
            worst = max(worst, (a - b).abs().max().item())
    return rows, worst


def _time_per_token(one: _Run, requests: int) -> str:
    # The first steps hold compilation; the median does not see them.
    step = statistics.median(one.result.step_seconds or [float("nan")])
    return f"{step / requests * 1e3:.2f} ms ({step * 1e3:.2f} ms a decode step)"


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    """Three ragged requests from the text, as bytes: whole windows and odd ends."""
    for name, least in (("layers", 1), ("window", 2), ("max_new_tokens", 2)):
        if getattr(args, name) < least:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is at least {least}; got {getattr(args, name)}")
    if args.text is None:
        data = files("swa_compile").joinpath("data/demo.txt").read_bytes()
    else:
        try:
            data = Path(args.text).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {args.text}: {error.strerror}") from error
    # Two requests take the same number of chunks, so that no forward has a single request: B = 1
    # would be a graph of its own.
    lengths = [2 * args.window + args.window // 2 + 1, 2 * args.window + 1, args.window // 2 + 1]
    spans = [(start, start + n) for start, n in zip((0, 100, 200), lengths, strict=True)]
    least = max(end for _, end in spans)
    if len(data) < least:
        raise UsageError(f"the text has {len(data)} bytes; window {args.window} wants {least}")
    return [list(data[start:end]) for start, end in spans]


def _text(tokens: list[int]) -> str:
    return bytes(tokens).decode("latin-1")
