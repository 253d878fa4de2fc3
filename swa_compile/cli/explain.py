"""`swa-compile explain MODULE:FACTORY`: compile something once and say what was hoisted."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from swa_compile.cli.errors import CheckFailed
from swa_compile.cli.importing import current_folder_importable, load


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="compile what FACTORY gives once and report what was hoisted"
    )
    parser.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (callable, args) or (callable, args, kwargs)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 where options={'strict': True} would raise"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report.

    Raises:
        UsageError: where MODULE:FACTORY does not name a factory, or it returns something else.
        CheckFailed: with --strict, where a translation stays in layer code or a cache is copied.
    """
    from swa_compile.explaining import explain
    from swa_compile.narrating import narrate, strict_failures

    with current_folder_importable():
        fn, fn_args, fn_kwargs = load(args.target)
        report = explain(fn, *fn_args, **fn_kwargs)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(narrate(report), markup=False)
    if args.strict:
        failures = [line for graph in report.graphs for line in strict_failures(graph)]
        if failures:
            raise CheckFailed("; ".join(failures))
