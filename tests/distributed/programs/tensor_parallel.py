"""The reference model, tensor parallel, compiled: logits, caches, reports and collectives."""

import steps
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graphs import collectives, plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import swa_compile
from swa_compile.models.tensor_parallel import parallelize, shard, shard_specs


class Watched(nn.Module):
    """`model` with a collective in front whose result nobody reads."""

    def __init__(self, model, group):
        super().__init__()
        self.model, self.group = model, group.group_name

    def forward(self, batch):
        funcol.all_gather_tensor(batch.positions.float(), 0, self.group)
        return self.model(batch)


def main(rank, form, engine, dump_dir, kv_heads=4, options=None, device="cpu", verify=True):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    config = steps.HybridConfig(**{**vars(steps.CONFIG), "kv_heads": kv_heads})
    specs = shard_specs(config.layer_specs(), ranks)
    model, pool = steps.whole_model(specs, config, device)
    if form == "dtensor":
        parallelize(model, init_device_mesh(device, (ranks,)))
    else:
        shard(model, group)
    options = {**(options or {}), "dump_dir": f"{dump_dir}/{rank}"}
    torch._dynamo.reset()
    with swa_compile.collect() as reports:
        forward = torch.compile(
            Watched(model, group), backend=engine, fullgraph=True, options=options, dynamic=True
        )
        logits = steps.run(forward, pool)
    return {
        "logits": logits,
        "rows": steps.rows(pool),
        "mapping": pool.full_to_swa_index_mapping.cpu(),
        "kv_heads": [spec.kv_heads for spec in pool.layers],
        "reports": plain(reports),
        "collectives": [collectives(report) for report in reports],
        "identity": swa_compile.verify_ranks(reports, options) if verify else None,
    }
