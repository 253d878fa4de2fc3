"""Data-parallel attention with a cut MLP: ranks of unlike N agree, pad, run and trim."""

import os

import torch
import torch.distributed as dist

import swa_compile
from swa_compile.distributed import agree_on_bucket
from swa_compile.models.data_parallel import shard_mlp

from . import steps
from .graphs import collectives, plain

SIZES = (4, 8, 16, 32)


def main(
    rank,
    engine="swa_eager",
    dump_dir=None,
    turns=False,
    caches=None,
    device="cpu",
    layers=steps.CONFIG.layers,
):
    """One run per item of `caches` (folders for Inductor's cache, by rank), or one."""
    config = steps.HybridConfig(**{**vars(steps.CONFIG), "layers": layers})
    results = []
    for folders in caches or [None]:
        if folders:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[rank]
        torch._dynamo.reset()
        results.append(one_run(rank, config, engine, dump_dir, turns, device))
    return results


def one_run(rank, config, engine, dump_dir, turns, device):
    group = dist.group.WORLD
    model, pool = steps.whole_model(config=config, device=device)
    shard_mlp(model, group)
    options = {"dump_dir": f"{dump_dir}/{rank}"} if dump_dir else {}
    buckets = []

    def padded(batch):
        tokens, requests = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        bucket = agree_on_bucket(tokens, requests, SIZES)  # outside of the graph
        buckets.append(bucket)
        return steps.marked(batch.pad(bucket.tokens, bucket.requests)), requests

    def forward(given):
        batch, requests = given
        if turns and len(buckets) == 1:
            wait_for_turn(rank)
        return compiled(batch)[:requests]

    def backend(gm, inputs):
        code = swa_compile.backend(engine, **options)(gm, inputs)
        done.append(rank)
        if turns:
            store().set(f"rank {rank} has compiled", "")
        return code

    done = []
    with swa_compile.collect() as reports:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        logits = steps.run(forward, pool, own_steps(rank), padded)
    return {
        "logits": logits,
        "rows": steps.rows(pool),
        "buckets": buckets,
        "compilations": len(done),
        "reports": plain(reports),
        "collectives": [collectives(report) for report in reports] if dump_dir else [],
    }


def own_steps(rank):
    """The requests of a rank: all three, the first, none at all, two of them from the second step.

    A rank without work has steps of no tokens.
    """
    requests, late = [((0, 1, 2), 0), ((0,), 0), ((), 0), ((1, 2), 1)][rank]
    return [
        {i: ids for i, ids in step.items() if i in requests and at >= late}
        for at, step in enumerate(steps.steps())
    ]


def wait_for_turn(rank):
    """Until the rank before has compiled: it ran nothing with us, so it needed nothing of us."""
    if rank:
        store().wait([f"rank {rank - 1} has compiled"])


def store():
    return dist.distributed_c10d._get_default_store()
