"""transformers models, tensor parallel by DTensor, compiled over a pool of this rank's KV heads."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import swa_compile

from . import hf_families, steps
from .graphs import collectives, plain


def main(rank, families, dump_dir):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {family: one(family, mesh, f"{dump_dir}/{family}-{rank}") for family in families}


def one(family, mesh, dump_dir):
    kv_heads = hf_families.SIZES["num_key_value_heads"] // mesh.size()
    pool = steps.pool_of(hf_families.specs(family, kv_heads))
    forward = hf_families.OverThePool(hf_families.sharded(family, mesh), pool)
    torch._dynamo.reset()
    options = {"dump_dir": dump_dir, "strict": True}
    with swa_compile.collect() as reports:
        compiled = torch.compile(forward, backend="swa_eager", fullgraph=True, options=options)
        logits = steps.run(compiled, pool, prepare=steps.marked)
    return {
        "logits": logits,
        "rows": steps.rows(pool),
        "mapping": pool.full_to_swa_index_mapping,
        "req_to_token": pool.req_to_token,
        "reports": plain(reports),
        "collectives": [collectives(report) for report in reports],
    }
