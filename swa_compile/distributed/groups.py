"""Small tensors across the ranks of a process group, over whatever the group runs on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`row` `[n]` of every rank, `[ranks, n]` on the CPU, in the group's order: one all-gather."""
    device = host_device(group)
    rows = [torch.empty_like(row, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row.to(device), group=group)
    return torch.stack(rows).cpu()


def host_device(group: dist.ProcessGroup | None) -> torch.device:
    """The CPU where the group can talk about tensors there, else its accelerator."""
    backends = dist.get_backend_config(group).split(",")
    kinds = [backend.split(":")[0] for backend in backends]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of `group` by their numbers among all processes, in the group's order."""
    return dist.get_process_group_ranks(group)
