"""Pipeline parallel: each rank a stage, with the layers and the pool of that stage alone."""

import torch
import torch.distributed as dist

import swa_compile
from swa_compile.models.pipeline_parallel import Stage, stage_layers

from . import steps
from .graphs import plain


def main(rank, layers, summaries=True):
    stages = dist.get_world_size()
    config = steps.HybridConfig(**{**vars(steps.CONFIG), "layers": tuple(layers)})
    own = stage_layers(len(layers), rank, stages)
    whole, _ = steps.whole_model(config=config)
    _, pool = steps.whole_model([config.layer_specs()[i] for i in own], config)

    def forward(batch):
        x = None
        if rank > 0:  # between the stages, outside of their graphs
            x = torch.empty(len(batch.input_ids), config.d_model)
            dist.recv(x, rank - 1)
            swa_compile.mark_sizes(x)
        out = compiled(batch, x)
        if rank + 1 < stages:
            dist.send(out, rank + 1)
        return out

    with swa_compile.collect() as reports:
        compiled = torch.compile(Stage(whole, own, pool), backend="swa_eager", fullgraph=True)
        out = steps.run(forward, pool, prepare=steps.marked)
    return {
        "out": out,
        "own": own,
        "rows": steps.rows(pool),
        "reports": plain(reports),
        "summaries": [report.summary() for report in reports],
    }
