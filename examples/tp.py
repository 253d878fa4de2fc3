"""Tensor parallel: the reference model cut over ranks, compiled, against itself uncut.

    torchrun --standalone --nproc-per-node 2 examples/tp.py [--form dtensor] [--backend swa_eager]

Each rank holds its part of the KV heads and makes its translations itself, in one node. Rank 0 also
decodes with the whole model, eager, and compares the tokens and its part of every cache row.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import swa_compile
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.models.greedy import greedy
from swa_compile.models.tensor_parallel import kv_heads_of, parallelize, shard, shard_specs

CONFIG = HybridConfig(layers=("swa", "full", "swa"), heads=8, kv_heads=4, head_dim=16, window=16)
PROMPTS = [list(b"a window slides over what was said"), list(b"two ranks")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=["functional", "dtensor"], default="functional")
    parser.add_argument("--backend", choices=["swa", "swa_eager"], default="swa")
    args = parser.parse_args()

    device = join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, pool = build(shard_specs(CONFIG.layer_specs(), ranks), device)
    if args.form == "dtensor":
        parallelize(model, init_device_mesh(device.type, (ranks,)))
    else:
        shard(model, dist.group.WORLD)

    options = {"strict": True}
    compiled = torch.compile(model, backend=args.backend, fullgraph=True, options=options)
    with swa_compile.collect() as reports:
        ours = decode(compiled, pool)
    identity = swa_compile.verify_ranks(reports, options)

    if rank == 0:
        whole, whole_pool = build(CONFIG.layer_specs(), device)
        wanted = decode(whole, whole_pool)
        compared = compare_rows(pool, whole_pool, kv_heads_of(CONFIG.kv_heads, rank, ranks))
        print(f"{ranks} ranks, {args.form} collectives, {args.backend}, {device.type}")
        print(reports[0].summary())
        print(f"ranks agree: {identity[:16]}")
        print(f"tokens equal: {ours == wanted}; cache rows equal: {compared}")
        if ours != wanted or not compared:
            raise SystemExit("the ranks and the whole model differ")
    dist.barrier()
    dist.destroy_process_group()


def join() -> torch.device:
    """The process group that torchrun describes: NCCL where each rank has a GPU, else gloo."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    ):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build(specs, device):
    """The whole model with the same weights on every rank, and a pool of `specs`."""
    pool = HybridKVPool(specs, max_tokens=256, max_requests=2, max_context=128, device=device)
    torch.manual_seed(0)
    return HybridTransformer(CONFIG, pool).eval().requires_grad_(False).to(device), pool


def decode(forward, pool):
    def marked(batch):
        swa_compile.mark_sizes(batch)
        return forward(batch)

    return greedy(marked, pool, PROMPTS, 12, chunk=16, table_width=128).tokens


def compare_rows(pool, whole_pool, heads):
    """True where every cache row but the sink's is this rank's part of the whole one."""
    return all(
        torch.allclose(ours[1:], theirs[1:, heads.start : heads.stop], atol=1e-4)
        for i in range(len(pool.layers))
        for ours, theirs in (
            (pool.k_cache(i), whole_pool.k_cache(i)),
            (pool.v_cache(i), whole_pool.v_cache(i)),
        )
    )


if __name__ == "__main__":
    main()
