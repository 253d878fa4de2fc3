"""Context parallel: K/V gathered and stored everywhere, queries of this rank's tokens alone."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import swa_compile
from swa_compile.models.context_parallel import ContextTransformer, split_context
from swa_compile.ops import store_kv, translate_loc

from . import steps
from .graphs import collectives, plain


def main(rank, dump_dir):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    model, pool = steps.whole_model()
    options = {"dump_dir": f"{dump_dir}/{rank}", "strict": True}

    def split(batch):
        shard = split_context(batch, batch.cu_seqlens_q.tolist(), rank, ranks)
        sizes.append((len(batch.input_ids), len(shard.batch.input_ids)))
        return steps.marked(shard)

    sizes = []
    with swa_compile.collect() as reports:
        forward = torch.compile(
            ContextTransformer(model, group), backend="swa_eager", fullgraph=True, options=options
        )
        logits = steps.run(forward, pool, prepare=split)
    return {
        "logits": logits,
        "rows": steps.rows(pool),
        "sizes": sizes,
        "reports": plain(reports),
        "collectives": [collectives(report) for report in reports],
        "own rows": own_rows(rank, ranks, group),
    }


def own_rows(rank, ranks, group):
    """A forward in which locations themselves are global for stores and local for queries.

    The local ones are an input of their own: nothing in the graph says that they are a part.
    """
    generator = torch.Generator().manual_seed(3)
    mapping = torch.cat([torch.zeros(40).long(), torch.randperm(20) + 1, torch.tensor([-1])])
    loc = 40 + torch.randperm(20, generator=generator)[: 3 * ranks]
    k = torch.randn(3 * ranks, 2, 4, generator=generator)
    caches = [[torch.zeros(21, 2, 4) for _ in "kv"] for _ in range(2)]
    dist.broadcast(mapping, 0)
    own = slice(3 * rank, 3 * rank + 3)

    def forward(mapping, loc, local_loc, k):
        seen = []
        for i, (k_cache, v_cache) in enumerate(caches):
            rows = funcol.all_gather_tensor(k + i, 0, group)
            store_kv(k_cache, v_cache, rows, -rows, translate_loc(mapping, loc))
            seen.append(k_cache[translate_loc(mapping, local_loc)])
        return seen

    torch._dynamo.reset()
    with torch.no_grad(), swa_compile.collect() as reports:
        compiled = torch.compile(forward, backend="swa_eager", fullgraph=True)
        seen = compiled(mapping, loc, loc[own].clone(), k[own].clone())
    return {
        "mapping": mapping,
        "loc": loc,
        "k": k,
        "caches": caches,
        "seen": seen,
        "report": reports[0].to_dict(),
    }
