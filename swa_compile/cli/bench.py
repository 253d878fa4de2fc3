"""`swa-compile bench`: decode steps of a reference model, against what one could do without us."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from swa_compile.cli.device import add_device_option, chosen_device
from swa_compile.cli.errors import CheckFailed, UsageError

_CONFIGS = ("ref24", "gpt-oss-20b", "gemma-3", "small")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time decode steps of a reference model against other ways to run them",
        description="Time one decode step of a model: eager, with torch.compile, hoisted by hand, "
        "and with this backend. All are built from the same weights, compared with eager code "
        "(outputs, and every row of every cache), and timed in turns.",
    )
    parser.add_argument("--config", choices=_CONFIGS, help="the model (ref24; small on a CPU)")
    parser.add_argument(
        "--batch", type=int, nargs="*", default=[], help="requests that decode together (64; 4)"
    )
    parser.add_argument(
        "--window",
        type=int,
        nargs="*",
        default=[],
        help="keys that an swa layer sees (the model's)",
    )
    parser.add_argument("--context", type=int, help="tokens of the longest request (the model's)")
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="NAME", help="names, or letters a to f (all)"
    )
    parser.add_argument(
        "--targets", action="store_true", help="everything that the project is held against"
    )
    parser.add_argument(
        "--rows",
        nargs="*",
        default=[],
        metavar="PREFIX",
        help="of --targets only these, e.g. stores",
    )
    parser.add_argument("--budget", type=float, help="start nothing that would pass these seconds")
    parser.add_argument(
        "--jobs", type=int, help="variants compiled ahead at once (by cores and memory; 1: none)"
    )
    parser.add_argument("--runs", type=int, help="timed steps of each (60)")
    parser.add_argument("--quick", action="store_true", help="few timed steps: a look, no figure")
    parser.add_argument("--json", metavar="FILE", help="write the results there, row by row")
    parser.add_argument(
        "--resume", action="store_true", help="keep what FILE has, measure the rest"
    )
    parser.add_argument("--render", metavar="FILE", help="print FILE as Markdown; measure nothing")
    parser.add_argument("--plot", metavar="DIR", help="write plots there, as PNG")
    add_device_option(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Measure, print the tables, write JSON and plots as asked.

    Raises:
        UsageError: for options that cannot be run.
        CheckFailed: a variant was wrong or failed.
    """
    from swa_compile.bench.record import Record, RecordError, about
    from swa_compile.bench.render import markdown, show

    # Where nobody says how wide a pipe or a file is, the tables' lines need not be broken.
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    _check(args)
    console = Console(highlight=False, width=None if known else 160)
    try:
        if args.render:
            record = Record.read(Path(args.render))
            print(markdown(record), end="")
            _plot(record, args.plot)
            return
        runs = _runs(args)
        device = chosen_device(args.device)
        told = about(device, runs=runs)
        path = Path(args.json) if args.json else None
        record = Record.continued(path, told) if path and args.resume else Record(told, path)
        _measure(args, record, device, runs, console)
    except RecordError as error:
        raise UsageError(str(error)) from error
    show(console, record)
    _plot(record, args.plot)
    _raise_where_wrong(record)


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored, or only fail once all is measured.

    Raises:
        UsageError: saying which.
    """
    if args.resume and not args.json:
        raise UsageError("--resume goes on with the file that --json names; there is none")
    if args.rows and not args.targets:
        raise UsageError("--rows picks rows of --targets")
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs is at least 1; got {args.jobs}")
    if args.budget is not None and args.budget <= 0:
        raise UsageError(f"--budget is a number of seconds above 0; got {args.budget:g}")
    if args.plot is not None:
        from swa_compile.bench.plots import NoMatplotlib, require_matplotlib

        try:
            require_matplotlib()
        except NoMatplotlib as error:
            raise UsageError(str(error)) from error


def _runs(args: argparse.Namespace) -> int:
    runs: int = args.runs if args.runs is not None else (10 if args.quick else 60)
    if runs < 1:
        raise UsageError(f"--runs is at least 1; got {runs}")
    return runs


def _jobs(args: argparse.Namespace, device: Any, runs: int) -> list[Any]:
    """What to measure.

    Raises:
        UsageError: there is no such variant, or a size is not possible.
    """
    from swa_compile.bench.configs import CONFIGS, Shape
    from swa_compile.bench.plan import step_job, target_jobs
    from swa_compile.bench.variants import chosen

    gpu = device.type == "cuda"
    config = CONFIGS[args.config or ("ref24" if gpu else "small")]
    try:
        if args.targets:
            every = target_jobs(
                device, runs, quick=args.quick, variants=args.variants, jobs=args.jobs
            )
            return _picked(every, args.rows)
        return [
            step_job(
                config,
                Shape.of(config, batch, window, args.context),
                chosen(args.variants),
                device,
                runs,
                args.jobs,
            )
            for batch in args.batch or [64 if gpu else 4]
            for window in args.window or [config.window]
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error


def _picked(jobs: list[Any], prefixes: list[str]) -> list[Any]:
    unknown = [p for p in prefixes if not any(job.name.startswith(p) for job in jobs)]
    if unknown:
        names = ", ".join(job.name for job in jobs)
        raise UsageError(f"no row is called {unknown[0]!r}; the rows are {names}")
    return [job for job in jobs if not prefixes or job.name.startswith(tuple(prefixes))]


def _measure(
    args: argparse.Namespace, record: Any, device: Any, runs: int, console: Console
) -> None:
    import torch

    from swa_compile.bench.plan import carry_out

    if device.type == "cpu":
        torch.set_num_threads(1)  # as in the demo: such layers are too small for two
    jobs = _jobs(args, device, runs)
    if console.is_terminal:
        with console.status("starting") as status:
            left = carry_out(jobs, record, budget=args.budget, say=status.update)
    else:
        left = carry_out(jobs, record, budget=args.budget, say=console.print)
    if left:
        console.print(f"no time was left for: {', '.join(left)}")


def _plot(record: Any, folder: str | None) -> None:
    if folder is not None:
        from swa_compile.bench.plots import plot

        plot(record, Path(folder))


def _raise_where_wrong(record: Any) -> None:
    bad = [f"{name}: {row['error']}" for name, row in record.rows.items() if "error" in row]
    bad += [
        f"{name}, {variant}: {entry['status']}: {entry['reason']}"
        for name, row in record.of_kind("steps").items()
        for variant, entry in row.get("variants", {}).items()
        if entry["status"] in ("wrong", "failed")
    ]
    if bad:
        raise CheckFailed(bad[0] + (f" (and {len(bad) - 1} more)" if bad[1:] else ""))
