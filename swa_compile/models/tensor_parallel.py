"""The reference model cut over the ranks of a group: attention by heads, the MLP by columns.

Twice, with the same collectives in the same places: `shard` with functional collectives, and
`parallelize` with DTensor. Each rank has a pool of its own for its KV heads (`shard_specs`), with
the same slots; mapping, locations and page tables are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from swa_compile.kv import LayerSpec
from swa_compile.models.hybrid import Attention, HybridTransformer, Layer


def kv_heads_of(kv_heads: int, rank: int, ranks: int) -> range:
    """The KV heads that `rank` holds; with more ranks than heads, several ranks hold the same one.

    Raises:
        ValueError: neither divides the other.
    """
    if kv_heads % ranks == 0:
        each = kv_heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % kv_heads == 0:
        head = rank * kv_heads // ranks
        return range(head, head + 1)
    raise ValueError(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")


def shard_specs(specs: Sequence[LayerSpec], ranks: int) -> list[LayerSpec]:
    """What the pool of each of `ranks` ranks holds of the layers `specs`.

    Raises:
        ValueError: the KV heads of a layer cannot be divided so.
    """
    return [replace(spec, kv_heads=len(kv_heads_of(spec.kv_heads, 0, ranks))) for spec in specs]


@torch.no_grad()
def shard(model: HybridTransformer, group: dist.ProcessGroup) -> None:
    """Keep of `model`, in place, what this rank of `group` computes; functional collectives.

    Two all-reduces of `[N, d_model]` per layer, behind attention and MLP. Every rank gives the same
    weights; embedding, norms and head stay whole.

    Raises:
        ValueError: heads or the MLP's width cannot be divided among the ranks.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in layers_of(model):
        take_heads(layer.attention, rank, ranks)
        layer.attention.qkv = cut(layer.attention.qkv, 0, rank, ranks)
        layer.attention.out = SummedLinear(cut(layer.attention.out, 1, rank, ranks), group)
        layer.up = cut(layer.up, 0, rank, ranks)
        layer.down = SummedLinear(cut(layer.down, 1, rank, ranks), group)


@torch.no_grad()
def parallelize(model: HybridTransformer, mesh: DeviceMesh) -> None:
    """The same with DTensor over a one-dimensional `mesh`, in place; weights come from rank 0.

    Raises:
        ValueError: heads or the MLP's width cannot be divided among the ranks.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for layer in layers_of(model):
        divides("rows", whole(layer.up).out_features, ranks)
        take_heads(layer.attention, rank, ranks)
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)


class SummedLinear(nn.Module):
    """A linear layer over a part of its inputs, summed over the ranks of `group`."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = linear.weight
        self.group = group.group_name

    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, self.weight), "sum", self.group)


def take_heads(attention: Attention, rank: int, ranks: int) -> None:
    """Set `attention` to the heads of `rank`, and order `qkv` so that its rows fall to ranks.

    The rows of `qkv` are all of q, then k, then v. Cut into equal parts they have to be q, k and v
    of rank 0, then those of rank 1, and so on; KV heads that several ranks hold stand several
    times. The output projection needs no order: its columns are those of q.
    """
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
    each = divides("heads", heads, ranks)
    q, k, v = attention.qkv.weight.unflatten(0, (-1, dim)).split([heads, kv_heads, kv_heads])
    parts: list[Tensor] = []
    for r in range(ranks):
        own = kv_heads_of(kv_heads, r, ranks)
        first, last = own.start, own.stop
        parts += [q[r * each : (r + 1) * each], k[first:last], v[first:last]]
    weight = torch.cat(parts).flatten(0, 1)
    attention.qkv = linear_of(weight)
    if attention.sinks is not None:
        own_sinks = attention.sinks[rank * each : (rank + 1) * each].clone()
        attention.sinks = nn.Parameter(own_sinks, requires_grad=False)
    attention.heads = each
    attention.kv_heads = len(kv_heads_of(kv_heads, rank, ranks))


def cut(linear: nn.Module, dim: int, rank: int, ranks: int) -> nn.Linear:
    """Part `rank` of `ranks` of the weight of `linear`: rows for `dim` 0, columns for 1."""
    weight = whole(linear).weight
    size = divides("rows" if dim == 0 else "columns", weight.shape[dim], ranks)
    weight = weight.narrow(dim, rank * size, size).contiguous()
    return linear_of(weight)


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer without bias that multiplies by `weight` `[out, in]`."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def layers_of(model: HybridTransformer) -> list[Layer]:
    """The layers of `model`, by their type."""
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def whole(linear: nn.Module) -> nn.Linear:
    """`linear`, which nobody has cut.

    Raises:
        TypeError: it is no linear layer, or no longer.
    """
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"a whole nn.Linear is wanted; got {type(linear).__name__}")
    return linear


def divides(what: str, count: int, ranks: int) -> int:
    """`count // ranks`.

    Raises:
        ValueError: it leaves a remainder.
    """
    if count % ranks:
        raise ValueError(f"{count} {what} cannot be divided among {ranks} ranks")
    return count // ranks
