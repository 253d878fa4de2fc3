"""The `--device` option."""

from __future__ import annotations

import argparse

import torch

from swa_compile.cli.errors import UsageError


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """`--device`: cpu, cuda, or auto for a GPU where there is one."""
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (auto)")


def chosen_device(name: str) -> torch.device:
    """The device that `--device name` means.

    Raises:
        UsageError: it cannot be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from error
    return device
