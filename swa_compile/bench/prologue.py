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

RUN = 64


def forward(mapping: Tensor, loc: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """The two translations of a layer, the table cast to int32 as kernels want it."""
    return translate_loc(mapping, loc), translate_page_table(mapping, page_table, 1).to(torch.int32)


def tables(batch: int, pages: int, ids: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Page tables `[batch, pages]` of ids below `ids`, by how these lie.

    A pool hands out the slots of a chunk of a prompt one after another. At random is the worst that
    can be: every id is another sector of the mapping, 32 bytes for each of 8 that are read.
    """
    runs = -(-pages // RUN)
    device = generator.device
    starts = torch.randint(ids - RUN, (batch, runs, 1), generator=generator, device=device)
    in_runs = (starts + torch.arange(RUN, device=device)).view(batch, -1)[:, :pages]
    at_random = torch.randint(ids, (batch, pages), generator=generator, device=device)
    return {
        f"runs of {RUN} ids": in_runs.to(torch.int32).contiguous(),
        "ids at random": at_random.to(torch.int32),
    }


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
        loc = torch.randperm(ids, generator=generator)[:batch]
    given = tables(batch, pages, ids, generator)
    size = next(iter(given.values()))
    copy = torch.empty_like(size)
    torch._dynamo.reset()
    say("compiling")
    call: Any = torch.compile(
        forward, backend="swa", options={"cudagraphs": "off"}, fullgraph=True, dynamic=False
    )
    steps: dict[str, Any] = {"copy": lambda: copy.copy_(size)}
    for name, table in given.items():
        for value, ids_in in zip(call(mapping, loc, table), (loc, table), strict=True):
            if not torch.equal(value.long(), mapping[ids_in.long()]):
                raise RuntimeError(f"the prologue translates wrongly ({name})")
        steps[name] = lambda table=table: call(mapping, loc, table)
    kernels = {}
    if device.type == "cuda":
        steps = {name: captured(step) for name, step in steps.items()}
        kernels = {name: profile_step(steps[name]) for name in given}
    say("timing")
    clock = "gpu" if device.type == "cuda" else "wall"
    samples = {name: s[clock] for name, s in interleaved(steps, runs, device).items()}
    us = {name: summary([value * 1e3 for value in values]) for name, values in samples.items()}
    moved = 2 * copy.numel() * copy.itemsize
    return {
        "batch": batch,
        "pages": pages,
        "table_mb": round(copy.numel() * copy.itemsize / 1e6, 3),
        "copy_tb_per_s": float(f"{moved / us['copy']['median'] / 1e6:.4g}"),
        "copy_us": us["copy"],
        "clock": clock,
        "tables": {
            name: {
                "us": us[name],
                "ratio": ratio_of(samples[name], samples["copy"]),
                "kernels": kernels.get(name),
            }
            for name in given
        },
    }
