"""`swa-compile explain`: compile a callable or a checkpoint once and say what was hoisted."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swa_compile.cli.checkpoint import Checkpoint, add_model_options
from swa_compile.cli.device import add_device_option, chosen_device
from swa_compile.cli.errors import CheckFailed, UsageError
from swa_compile.cli.importing import current_folder_importable, load

if TYPE_CHECKING:
    from swa_compile.explaining import Report

# A FACTORY decides these itself.
_OF_MODELS = ("prompt", "dtype", "seed", "page_size", "device")
# Without a tokenizer or a prompt: ids that every vocabulary has.
_PROMPT = [1, 2, 3]
# Of the caches at least: one of a few rows would be the size of anything.
_ROWS = 1009


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="compile what FACTORY gives, or a transformers model, and report what was hoisted",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (callable, args) or (callable, args, kwargs)",
    )
    add_model_options(parser, required=False)
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="with --model: what it is run on"
    )
    add_device_option(parser)
    parser.set_defaults(unasked={name: parser.get_default(name) for name in _OF_MODELS})
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 where options={'strict': True} would raise"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the report.

    Raises:
        UsageError: where MODULE:FACTORY does not name a factory, or it returns something else, or
            the model cannot be used.
        CheckFailed: with --strict, where a translation stays in layer code or a cache is copied.
    """
    from swa_compile.explaining import explain
    from swa_compile.narrating import narrate, strict_failures

    if (args.target is None) == (args.model is None):
        raise UsageError("explain wants MODULE:FACTORY or --model PATH, and not both")
    if args.model is not None:
        report = _explain_model(args)
    else:
        for name, default in args.unasked.items():
            if getattr(args, name) != default:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} is for a --model; a FACTORY decides that itself")
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


def _explain_model(args: argparse.Namespace) -> Report:
    """The forward of a checkpoint over a pool, compiled as `generate` does it."""
    from swa_compile.explaining import Report
    from swa_compile.hf import HybridGenerator

    checkpoint = Checkpoint.open(args.model, args.dtype, args.seed, chosen_device(args.device))
    prompts = [checkpoint.encode(text) for text in args.prompt or []] or [_PROMPT]
    lengths = [len(prompt) + args.page_size for prompt in prompts]
    try:
        generator = HybridGenerator(
            checkpoint.model,
            max_tokens=max(_ROWS, sum(lengths)),
            max_requests=len(prompts),
            max_context=max(lengths),
            page_size=args.page_size,
        )
        generator.prefill(prompts)
    except ValueError as error:  # an unsupported model, or a prompt that does not fit
        raise UsageError(str(error)) from error
    return Report(generator.reports)  # compiled whole: a graph break is an error
