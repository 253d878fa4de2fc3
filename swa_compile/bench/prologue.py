"""The prologue over a large page table, against the time in which the card copies as many bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_compile.bench.configs import CONFIGS
from swa_compile.bench.graphs import captured
from swa_compile.bench.profiling import profile_step
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say
from swa_compile.bench.targets import ratio_of
from swa_compile.bench.timing import interleaved, summary
from swa_compile.ops import translate_loc, translate_page_table


def forward(mapping: Tensor, loc: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """The two translations of a layer, the table cast to int32 as kernels want it."""
    return translate_loc(mapping, loc), translate_page_table(mapping, page_table, 1).to(torch.int32)


@torch.no_grad()
def measure(
    batch: int,
    pages: int,
    device: torch.device,
    *,
    runs: int,
    say: Say = lambda _: None,
) -> Row:
    """The prologue of `[batch, pages]` int32, and a copy of a tensor of that size.

    Either reads the table's bytes once and writes as many. The mapping (2 MiB for 262,144 ids) is
    read on top, and stays in the card's L2.

    Raises:
        RuntimeError: the prologue translates wrongly.
    """
    ids = CONFIGS["ref24"].full_tokens if device.type == "cuda" else 4096
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        mapping = torch.cat([torch.randperm(ids, generator=generator), torch.tensor([0, -1])])
        size = (batch, pages)
        table = torch.randint(ids, size, dtype=torch.int32, generator=generator)
        loc = torch.randperm(ids, generator=generator)[:batch]
    copy = torch.empty_like(table)
    torch._dynamo.reset()
    say("compiling")
    call: Any = torch.compile(
        forward, backend="swa", options={"cudagraphs": "off"}, fullgraph=True, dynamic=False
    )
    got = call(mapping, loc, table)
    for value, ids_in in zip(got, (loc, table), strict=True):
        if not torch.equal(value.long(), mapping[ids_in.long()]):
            raise RuntimeError("the prologue translates wrongly")
    del got
    steps = {"prologue": lambda: call(mapping, loc, table), "copy": lambda: copy.copy_(table)}
    entry: dict[str, Any] = {}
    if device.type == "cuda":
        steps = {name: captured(step) for name, step in steps.items()}
        entry["kernels"] = profile_step(steps["prologue"])
    say("timing")
    clock = "gpu" if device.type == "cuda" else "wall"
    samples = {name: s[clock] for name, s in interleaved(steps, runs, device).items()}
    for name, values in samples.items():
        entry[f"{name}_us"] = summary([value * 1e3 for value in values])
    moved = 2 * table.numel() * table.itemsize
    copy_us = entry["copy_us"]["median"]
    return {
        "batch": batch,
        "pages": pages,
        "table_mb": round(table.numel() * table.itemsize / 1e6, 3),
        "copy_tb_per_s": float(f"{moved / copy_us / 1e6:.4g}"),
        "ratio": ratio_of(samples["prologue"], samples["copy"]),
        "clock": clock,
        **entry,
    }
