"""Translation kernels and launches of one forward, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from swa_compile.bench.configs import CONFIGS, Shape
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say
from swa_compile.bench.steps import measure as measure_step
from swa_compile.bench.variants import VARIANTS

# ref24 in everything but width: what is counted does not depend on it, and compiles sooner.
_NARROW = replace(
    CONFIGS["ref24"],
    name="ref24, narrow",
    d_model=256,
    heads=8,
    kv_heads=2,
    mlp_width=512,
    full_tokens=8192,
    swa_tokens=4096,
)


def measure(depths: Sequence[int], device: torch.device, *, say: Say = lambda _: None) -> Row:
    """For each of `depths`: what the report counts, and on a GPU the launches of one step.

    Raises:
        RuntimeError: a step was wrong, or failed.
    """
    entries = []
    for layers in depths:
        config = replace(_NARROW, layers=("swa",) * layers)
        if device.type != "cuda":
            config = replace(config, dtype=torch.float32)
        shape = Shape.of(config, 8, 128)
        row = measure_step(
            config,
            shape,
            [VARIANTS["swa"]],
            device,
            runs=2,
            say=lambda what, layers=layers: say(f"{layers} layers: {what}"),  # type: ignore[misc]
        )
        entry = row["variants"]["swa"]
        if entry["status"] != "ok":
            raise RuntimeError(f"{layers} layers: {entry['status']}: {entry['reason']}")
        kernels = entry.get("kernels", {})
        entries.append(
            {
                "layers": layers,
                "prepare_s": entry["prepare_s"],
                "launches": kernels.get("launches"),
                **{
                    name: entry["report"][name]
                    for name in ("mapping_kernels", "mapping_kernels_late", "translation_nodes")
                },
            }
        )
    return {"depths": entries}
