"""Compilations of one row ahead and at once, each in a process of its own, into the shared cache.

Only code is made there: kernels are launched, and their blocks chosen by timing, in the process
that measures, which has the card for itself then.

As a program (`python -m swa_compile.bench.prefetch`) this is one of those processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swa_compile.bench.configs import CONFIGS, BenchConfig, Shape
from swa_compile.bench.variants import VARIANTS, NotHere, Variant, require_available


def prefetch(
    config: BenchConfig,
    shape: Shape,
    variants: Sequence[Variant],
    device: torch.device,
    jobs: int,
) -> list[str]:
    """Compile `variants`, `jobs` at a time; the names of those for which that failed.

    A failure costs time and nothing else: the variant is compiled again where it is measured.
    """
    waiting = [variant for variant in variants if _compiles(variant, device)]
    if jobs < 2 or len(waiting) < 2 or config.name not in CONFIGS:
        return []
    command = [sys.executable, "-m", "swa_compile.bench.prefetch", "--config", config.name]
    arguments = {
        "--batch": shape.batch,
        "--window": shape.window,
        "--context": shape.context,
        # torch's thread count is part of the key of what is cached.
        "--threads": torch.get_num_threads(),
        "--device": device,
    }
    for option, value in arguments.items():
        command += [option, str(value)]
    threads = max(1, (os.cpu_count() or 1) // min(jobs, len(waiting)))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    failed = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                variant = waiting.pop(0)
                running[variant.name] = subprocess.Popen(
                    [*command, "--variant", variant.name],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            for name, process in list(running.items()):
                try:
                    code = process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                del running[name]
                failed += [name] if code else []
    finally:
        for process in running.values():
            process.kill()
    return failed


def default_jobs(config: BenchConfig, device: torch.device) -> int:
    """How many such processes the machine has room for: two cores each, and memory for a model."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min((os.cpu_count() or 1) // 2, int(0.9 * free) // _bytes(config)))


def _bytes(config: BenchConfig) -> int:
    """What one process takes on the card: weights, caches, and the context."""
    gate = 3 if config.mlp != "gelu" else 2
    heads = config.heads * config.head_dim
    weights = config.d_model * (config.qkv_width + heads + gate * config.mlp_width)
    rows = {"full": config.full_tokens, "swa": config.swa_tokens}
    cached = sum(rows[kind] for kind in config.layers) * 2 * config.kv_heads * config.head_dim
    return (weights * len(config.layers) + cached) * config.dtype.itemsize + 2**30


def _compiles(variant: Variant, device: torch.device) -> bool:
    try:
        require_available(variant, device)
    except NotHere:
        return False
    # These two capture the code of "swa".
    return variant.backend is not None and variant.name not in ("swa-runner", "swa-full")


def _compile_alone(variant: Variant) -> Callable[..., Any]:
    """The backend of `variant`, whose result runs nothing."""
    from torch._inductor.compile_fx import compile_fx

    from swa_compile.backends import swa

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if variant.backend == "swa":
            swa(gm, inputs, options=dict(variant.options))
        else:
            compile_fx(gm, inputs, config_patches=dict(variant.options) or None)
        return lambda *_: (torch.empty(0),)

    return backend


@torch.no_grad()
def main() -> None:
    """Compile one variant of one row, and end."""
    from swa_compile.bench.inputs import Setting

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", choices=list(CONFIGS), required=True)
    for name in ("--batch", "--window", "--context", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--variant", choices=list(VARIANTS), required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape(args.batch, args.window, args.context)
    setting = Setting.make(CONFIGS[args.config], shape, torch.device(args.device))
    variant = VARIANTS[args.variant]
    forward = torch.compile(
        variant.forward(setting), backend=_compile_alone(variant), fullgraph=True, dynamic=False
    )
    forward(setting.x, setting.batch)


if __name__ == "__main__":
    main()
