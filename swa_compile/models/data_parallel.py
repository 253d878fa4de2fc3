"""The reference model with data-parallel attention: requests stay on their rank, the MLP is cut.

Each rank holds its own requests and its own pool. Ahead of each MLP the ranks gather the tokens of
all, and behind it each gets the sums of its own back. So every rank runs every forward at the same
padded size, the idle ones too: see `swa_compile.distributed.agree_on_bucket`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F

from swa_compile.models.hybrid import HybridTransformer
from swa_compile.models.tensor_parallel import cut, layers_of


@torch.no_grad()
def shard_mlp(model: HybridTransformer, group: dist.ProcessGroup) -> None:
    """Keep of each MLP of `model`, in place, the columns of this rank of `group`.

    One all-gather and one reduce-scatter per layer, of `[ranks * N, d_model]`. Every rank gives the
    same weights.

    Raises:
        ValueError: the MLP's width cannot be divided among the ranks.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in layers_of(model):
        layer.up = GatheringLinear(cut(layer.up, 0, rank, ranks), group)
        layer.down = ScatteringLinear(cut(layer.down, 1, rank, ranks), group)


class GatheringLinear(nn.Module):
    """`[N, i]` -> `[ranks * N, o]`: a linear layer over the tokens of all ranks of `group`."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = linear.weight
        self.group = group.group_name

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(funcol.all_gather_tensor(x, 0, self.group), self.weight)


class ScatteringLinear(nn.Module):
    """`[ranks * N, i]` -> `[N, o]`: summed over the ranks, each of which gets its own tokens."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = linear.weight
        self.group = group.group_name

    def forward(self, x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(F.linear(x, self.weight), "sum", 0, self.group)
