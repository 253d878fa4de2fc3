"""The reference model, tensor parallel: logits, caches, reports and collectives."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import swa_compile
from swa_compile.models.tensor_parallel import parallelize, shard, shard_specs

from . import steps
from .graphs import collectives, plain


class Watched(nn.Module):
    """`model` with a collective in front whose result nobody reads."""

    def __init__(self, model, group):
        super().__init__()
        self.model, self.group = model, group.group_name

    def forward(self, batch):
        funcol.all_gather_tensor(batch.positions.float(), 0, self.group)
        return self.model(batch)


def main(
    rank,
    form,
    engine="eager",
    dump_dir=None,
    kv_heads=4,
    layers=steps.CONFIG.layers,
    options=None,
    device="cpu",
    cache_dir=None,
):
    if cache_dir:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    ranks, group = dist.get_world_size(), dist.group.WORLD
    config = steps.HybridConfig(**{**vars(steps.CONFIG), "kv_heads": kv_heads, "layers": layers})
    specs = shard_specs(config.layer_specs(), ranks)
    model, pool = steps.whole_model(specs, config, device)
    if form == "dtensor":
        parallelize(model, init_device_mesh(device, (ranks,)))
    else:
        shard(model, group)
    forward = Watched(model, group)
    with swa_compile.collect() as reports:
        if engine == "eager":
            logits = steps.run(forward, pool)
        else:
            options = {**(options or {}), "dump_dir": f"{dump_dir}/{rank}"}
            forward = torch.compile(forward, backend=engine, fullgraph=True, options=options)
            logits = steps.run(forward, pool, prepare=steps.marked)
    return {
        "logits": logits,
        "rows": steps.rows(pool),
        "mapping": pool.full_to_swa_index_mapping.cpu(),
        "kv_heads": [spec.kv_heads for spec in pool.layers],
        "reports": plain(reports),
        "collectives": [collectives(report) for report in reports],
        "identity": swa_compile.verify_ranks(reports, options),
    }
