"""Cold and warm start: two processes that share a compile cache, the first of which finds it empty.

The same of plain `torch.compile` stands beside it: most of a warm start is Dynamo's tracing and the
loading of what was compiled, which are not ours. As a program (`python -m swa_compile.bench.start`)
this is one of those processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from swa_compile.bench.configs import CONFIGS, BenchConfig, Shape
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say


def measure(
    config: BenchConfig, shape: Shape, device: torch.device, *, say: Say = lambda _: None
) -> Row:
    """Seconds from the call of the compiled step to its result, cold and warm; ours and plain.

    Raises:
        RuntimeError: a process failed; with the end of what it said.
    """
    ours = _both_starts("swa", config, shape, device, say)
    return {
        "config": config.name,
        "batch": shape.batch,
        "window": shape.window,
        **ours,
        "passes_share": round(ours["cold"]["passes_s"] / ours["cold"]["seconds"], 5),
        "plain": _both_starts("inductor", config, shape, device, say),
    }


def _both_starts(
    variant: str, config: BenchConfig, shape: Shape, device: torch.device, say: Say
) -> Row:
    found: Row = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in ("cold", "warm"):
            say(f"{variant}, {name}")
            found[name] = _start(variant, config, shape, device, folder)
    found["ratio"] = round(found["warm"]["seconds"] / found["cold"]["seconds"], 4)
    return found


def _start(
    variant: str, config: BenchConfig, shape: Shape, device: torch.device, folder: str
) -> Row:
    step = ("--variant", variant, "--config", config.name)
    sizes = ("--batch", shape.batch, "--window", shape.window, "--context", shape.context)
    command = (sys.executable, "-m", "swa_compile.bench.start", *step, *sizes)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    environment.pop("TRITON_CACHE_DIR", None)  # Triton's cache lies inside Inductor's then
    done = subprocess.run(
        [*map(str, command), "--device", str(device)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(f"the process that was to start ended with {done.returncode}: {last}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


@torch.no_grad()
def main() -> None:
    """Compile and run the step once; print the seconds as JSON."""
    from swa_compile import collect
    from swa_compile.bench.inputs import Setting
    from swa_compile.bench.pass_time import timed_passes
    from swa_compile.bench.variants import VARIANTS, compiled

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--variant", choices=list(VARIANTS), required=True)
    parser.add_argument("--config", choices=list(CONFIGS), required=True)
    for name in ("--batch", "--window", "--context"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = Shape(args.batch, args.window, args.context)
    setting = Setting.make(CONFIGS[args.config], shape, device)
    step = compiled(VARIANTS[args.variant], setting)
    with collect() as reports, timed_passes() as spent:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": round(seconds, 3),
                "passes_s": round(spent.seconds, 4),
                "nodes": spent.nodes,
                "from_cache": bool(reports) and all(report.from_cache for report in reports),
            }
        )
    )


if __name__ == "__main__":
    main()
