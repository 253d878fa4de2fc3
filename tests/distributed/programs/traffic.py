"""What eager forwards hand to collectives: calls and bytes, seen by the dispatcher."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from swa_compile.models.context_parallel import ContextTransformer, split_context
from swa_compile.models.data_parallel import shard_mlp
from swa_compile.models.tensor_parallel import shard, shard_specs

from . import steps

TOKENS = 8
_ops = torch.ops._c10d_functional
COLLECTIVES = (_ops.all_reduce, _ops.all_gather_into_tensor, _ops.reduce_scatter_tensor)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in COLLECTIVES:
            self.calls += 1
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def main(rank):
    """(calls, bytes) of one forward of `TOKENS` tokens of one request, for each way to share."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    found = {}

    model, pool = steps.whole_model(shard_specs(steps.CONFIG.layer_specs(), ranks))
    shard(model, group)
    found["tensor"] = counted(model, pool)

    model, pool = steps.whole_model()
    shard_mlp(model, group)
    found["data"] = counted(model, pool)

    model, pool = steps.whole_model()

    def split(batch):
        return split_context(batch, batch.cu_seqlens_q.tolist(), rank, ranks)

    found["context"] = counted(ContextTransformer(model, group), pool, split)
    return found


def counted(forward, pool, prepare=lambda batch: batch):
    batch = pool.batch({pool.open(): range(TOKENS)}, width=steps.WIDTH)
    with torch.no_grad(), Counted() as counts:
        forward(prepare(batch))
    return counts.calls, counts.bytes
