"""`swa-compile explain MODULE:FACTORY`: compile something once and say what was hoisted."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from rich.console import Console

from swa_compile.cli.errors import UsageError


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
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report.

    Raises:
        UsageError: where MODULE:FACTORY does not name a factory, or it returns something else.
    """
    from swa_compile.explaining import explain

    fn, fn_args, fn_kwargs = _load(args.target)
    report = explain(fn, *fn_args, **fn_kwargs)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(report.summary(), markup=False)


def _load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    module_name, colon, factory_name = target.partition(":")
    if not (module_name and colon and factory_name):
        raise UsageError(f"'{target}' is not of the form MODULE:FACTORY")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise UsageError(f"there is no module '{module_name}' on the path") from error
        raise
    finally:
        sys.path.remove(os.getcwd())
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise UsageError(f"module '{module_name}' has no factory '{factory_name}'")
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise UsageError(
            f"{target} returned {type(made).__name__}; wanted (callable, args) or "
            "(callable, args, kwargs)"
        )
    fn, fn_args, *rest = made
    return fn, tuple(fn_args), dict(rest[0]) if rest else {}
