"""`swa-compile diff DIR_A DIR_B`: what differs between two dumps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swa_compile.cli.errors import CheckFailed, UsageError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two dumps, of two torch versions, say",
        description="Compare reports, values, refusals and operator counts of two dumps, graph by "
        "graph in order. Exit code 1 where they differ.",
    )
    parser.add_argument("first", metavar="DIR_A", help="a dump directory, a process's or a graph's")
    parser.add_argument("second", metavar="DIR_B", help="likewise")
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the differences.

    Raises:
        UsageError: where a folder is not there, or holds no dump.
        CheckFailed: where the dumps differ.
    """
    from swa_compile.viewer.compare import compare, describe_makers

    first, second = Path(args.first), Path(args.second)
    for folder in (first, second):
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
    try:
        makers, lines = describe_makers(first, second), compare(first, second)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    for line in makers:
        print(f"made with {line}")
    for line in lines:
        print(line)
    if lines:
        raise CheckFailed(f"the dumps differ: {len(lines)} difference{'s' * (len(lines) != 1)}")
    print("no difference in reports and operator counts")
