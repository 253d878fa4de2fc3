"""`swa-compile bench`: a decode step, eager, with plain `torch.compile`, and with this backend."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from swa_compile.cli.device import add_device_option, chosen_device
from swa_compile.cli.errors import UsageError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time a decode step of the reference model",
        description="Time one decode step of the reference model: eager, torch.compile with "
        "Inductor, and with this backend. The three take turns, so a slow moment hits all of them; "
        "medians and quartiles of each are printed.",
    )
    for option, default, what in (
        ("--layers", 12, "layers, half of them swa"),
        ("--window", 128, "keys that an swa layer sees"),
        ("--batch", 8, "requests that decode together"),
        ("--context", 256, "tokens that each has in the cache"),
        ("--runs", 50, "timed steps of each"),
    ):
        parser.add_argument(option, type=int, default=default, help=f"{what} ({default})")
    add_device_option(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        UsageError: for options that cannot be run.
    """
    for name in ("layers", "window", "batch", "context", "runs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is at least 1; got {getattr(args, name)}")
    device = chosen_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in the demo: such layers are too small for two
    console = Console(highlight=False)
    steps = {}
    for name in ("eager", "inductor", "swa"):
        with console.status(f"preparing {name}"), torch.no_grad():
            steps[name] = _prepare(args, device, name)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with torch.no_grad(), console.status("timing"):
        for _ in range(args.runs):
            for name, step in steps.items():
                seconds[name].append(_timed(step, device))
    figures = {name: _summary(values) for name, values in seconds.items()}
    _print(console, figures)
    if args.json:
        about = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            **{name: getattr(args, name) for name in ("layers", "window", "batch", "context")},
        }
        Path(args.json).write_text(json.dumps({"about": about, "steps": figures}, indent=2) + "\n")


def _prepare(args: argparse.Namespace, device: torch.device, name: str) -> Callable[[], Any]:
    """A decode step on a pool of its own, compiled and warm."""
    from swa_compile.kv import HybridKVPool
    from swa_compile.models import HybridConfig, HybridTransformer

    kinds = tuple("swa" if i % 2 == 0 else "full" for i in range(args.layers))
    config = HybridConfig(layers=kinds, window=args.window)
    tokens = args.context + 1
    pool = HybridKVPool(
        config.layer_specs(),
        max_tokens=args.batch * tokens,
        max_requests=args.batch,
        max_context=tokens,
        swa_tokens=args.batch * tokens,
        device=device,
    )
    torch.manual_seed(0)
    model = HybridTransformer(config, pool).to(device).eval()
    requests = [pool.open() for _ in range(args.batch)]
    prompt = torch.randint(config.vocab_size, (args.batch, args.context)).tolist()
    model(pool.batch(list(zip(requests, prompt, strict=True)), width=tokens))
    batch = pool.batch([(request, [1]) for request in requests], width=tokens)
    forward: Any = model
    if name != "eager":
        torch._dynamo.reset()
        forward = torch.compile(model, backend=name, fullgraph=True)

    def step() -> Any:
        return forward(batch)

    for _ in range(3):
        step()
    return step


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _summary(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    if len(seconds) == 1:
        seconds = seconds * 2
    low, _, high = statistics.quantiles(seconds, n=4)
    names = ("median_ms", "q1_ms", "q3_ms")
    return {n: s * 1e3 for n, s in zip(names, (statistics.median(seconds), low, high), strict=True)}


def _print(console: Console, figures: dict[str, dict[str, float]]) -> None:
    table = Table(box=None, padding=(0, 2))
    for heading in ("", "median", "quartiles", "against swa"):
        table.add_column(heading, justify="right" if heading else "left")
    ours = figures["swa"]["median_ms"]
    for name, figure in figures.items():
        table.add_row(
            name,
            f"{figure['median_ms']:.2f} ms",
            f"{figure['q1_ms']:.2f} - {figure['q3_ms']:.2f}",
            f"{figure['median_ms'] / ours:.2f}x",
        )
    console.print(table)
