"""`swa-compile doctor`: versions, devices, and what works here."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from swa_compile.cli.errors import CheckFailed
from swa_compile.ops.attention_choice import KERNELS

_PACKAGES = ("torch", "triton", "depyf", "rich", "transformers", "flashinfer-python")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="show versions and devices, and try what has to work"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the findings.

    Raises:
        CheckFailed: where something that has to work does not.
    """
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("python", platform.python_version())
    for name in _PACKAGES:
        table.add_row(name, _version(name))
    table.add_row("C++ compiler", shutil.which("g++") or shutil.which("clang++") or "none")
    table.add_row("devices", ", ".join(_devices()))
    console.print(table)

    console.print(_attention_table())
    failed = []
    checks = _checks()
    for name, check in checks.items():
        try:
            detail = check()
        except Exception as error:  # a check reports whatever went wrong, and the next one runs
            failed.append(name)
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            console.print(f"[red]fails[/red]  {name}: {first_line}")
            if args.debug or args.debug_after:
                console.print_exception()
        else:
            console.print(f"[green]works[/green]  {name}{': ' + detail if detail else ''}")
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ["cpu", *gpus]


def _attention_table() -> Table:
    """Which kernels of `swa::paged_attention` can run on which device, and why others cannot."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    table = Table(box=None, padding=(0, 2), title_justify="left")
    table.add_column("attention")
    for device in devices:
        table.add_column(str(device))
    for kernel in KERNELS.values():
        reasons = (kernel.missing(device) or "works" for device in devices)
        table.add_row(kernel.name, *map(escape, reasons))
    return table


def _entry_points() -> str:
    names = torch.compiler.list_backends()
    missing = {"swa", "swa_eager"} - set(names)
    if missing:
        raise RuntimeError(f"torch.compile does not list {', '.join(sorted(missing))}")
    return "swa, swa_eager"


def _compile(backend: str, device: str) -> str:
    """A forward with two translations of one loc, compiled and compared with eager code."""
    import swa_compile
    from swa_compile.ops import store_kv, translate_loc

    def forward(mapping: Tensor, loc: Tensor, k: Tensor, cache: list[list[Tensor]]) -> None:
        for k_cache, v_cache in cache:
            store_kv(k_cache, v_cache, k, k + 1, translate_loc(mapping, loc))

    def inputs() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        mapping = torch.cat([torch.randperm(16, generator=generator), torch.tensor([-1])])
        loc = torch.tensor([9, 3, -1, 12])
        k = torch.randn(4, 2, 8, generator=generator)
        cache = [[torch.zeros(16, 2, 8, device=device) for _ in "kv"] for _ in range(2)]
        return mapping.to(device), loc.to(device), k.to(device), cache

    eager, compiled = inputs(), inputs()
    forward(*eager)
    torch._dynamo.reset()
    with swa_compile.collect() as reports:
        torch.compile(forward, backend=backend)(*compiled)
    for layer, (want, got) in enumerate(zip(eager[3], compiled[3], strict=True)):
        for w, g in zip(want, got, strict=True):
            if not torch.equal(w[1:], g[1:]):
                raise RuntimeError(f"cache rows of layer {layer} differ from eager code's")
    (report,) = reports
    if (report.translations_found, report.translation_nodes) != (2, 1):
        raise RuntimeError(f"expected 2 translations -> 1 node, got: {report.summary()}")
    return "2 translations -> 1 node, cache rows equal eager code's"


def _attention(device: str) -> str:
    """A decode call by the kernel that is chosen here, compared with the reference."""
    from swa_compile.ops import attention_kernel, paged_attention

    generator = torch.Generator().manual_seed(0)
    q, k_cache, v_cache = (
        torch.randn(rows, heads, 64, generator=generator).to(device)
        for rows, heads in ((3, 4), (64, 2), (64, 2))
    )
    table = torch.randperm(60, generator=generator).view(3, 20).to(device, torch.int32)
    lens = torch.tensor([20, 1, 13], dtype=torch.int32).to(device)
    starts = torch.arange(4, dtype=torch.int32).to(device)
    args = (q, k_cache, v_cache, table, lens, starts)
    got = paged_attention(*args, window=8)
    with attention_kernel("reference"):
        want = paged_attention(*args, window=8)
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
        raise RuntimeError("the result differs from the reference's")
    return "the result is the reference's"


def _triton() -> str:
    import triton
    import triton.runtime

    driver = triton.runtime.driver.active.get_current_target()
    return f"{triton.__version__} for {driver.backend} {driver.arch}"


def _checks() -> dict[str, Callable[[], str]]:
    checks: dict[str, Callable[[], str]] = {
        "backends found through entry points": _entry_points,
        "attention on cpu": lambda: _attention("cpu"),
        "swa_eager on cpu": lambda: _compile("swa_eager", "cpu"),
        "swa on cpu": lambda: _compile("swa", "cpu"),
    }
    if torch.cuda.is_available():
        checks["triton"] = _triton
        checks["attention on cuda"] = lambda: _attention("cuda")
        checks["swa on cuda"] = lambda: _compile("swa", "cuda")
    return checks
