"""Data parallel: each rank decodes its own requests, and all run every forward at one size.

    torchrun --standalone --nproc-per-node 2 examples/dp.py [--backend swa_eager]

The MLP is cut over the ranks, so every forward holds collectives, and a rank without work has to
run it, too: the last rank has no request. Each rank compares with the whole model, eager.
"""

import argparse
import os

import torch
import torch.distributed as dist

import swa_compile
from swa_compile.distributed import agree_on_bucket
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.models.data_parallel import shard_mlp

CONFIG = HybridConfig(layers=("swa", "full", "swa"), d_model=64, head_dim=16, window=16)
SIZES = (4, 16, 64)  # what forwards are compiled, or captured, for
STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["swa", "swa_eager"], default="swa")
    args = parser.parse_args()

    device, control = join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    prompts = [] if rank == ranks - 1 else [list(b"of rank %d" % rank)] * (rank + 1)
    model, pool = build(device)
    shard_mlp(model, dist.group.WORLD)

    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    with swa_compile.collect() as reports:
        ours, sizes = decode(compiled, pool, prompts, control)
    swa_compile.verify_ranks(reports, group=control)

    whole, whole_pool = build(device)
    wanted, _ = decode(whole, whole_pool, prompts, None)
    equal = ours == wanted
    print(f"rank {rank}: {len(prompts)} requests, padded to {sizes}, tokens equal: {equal}")
    if rank == 0:
        print(reports[0].summary())
    dist.barrier()
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(f"rank {rank} and the whole model differ")


def join() -> tuple[torch.device, dist.ProcessGroup]:
    """NCCL where each rank has a GPU, else gloo; and a gloo group for what hosts say."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    ):
        device = torch.device("cuda", local)
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device, dist.new_group(backend="gloo")


def build(device):
    """The whole model with the same weights on every rank, and a pool of its own."""
    pool = HybridKVPool(
        CONFIG.layer_specs(), max_tokens=512, max_requests=8, max_context=64, device=device
    )
    torch.manual_seed(0)
    return HybridTransformer(CONFIG, pool).eval().requires_grad_(False).to(device), pool


@torch.no_grad()
def decode(forward, pool, prompts, group):
    """Greedy tokens of each request, and the sizes that forwards were padded to.

    With `group` every step is agreed on by its ranks; without, the batch runs as it is.
    """
    requests = [pool.open() for _ in prompts]
    tokens, sizes = [[] for _ in prompts], []
    new = dict(zip(requests, prompts, strict=True))
    for _ in range(STEPS):
        batch = pool.batch(new, width=64)
        count = len(new)
        if group is not None:
            bucket = agree_on_bucket(len(batch.input_ids), count, SIZES, group)
            batch = batch.pad(bucket.tokens, bucket.requests)
            sizes.append(bucket.tokens)
            swa_compile.mark_sizes(batch)
        elif not count:
            continue
        chosen = forward(batch)[:count].argmax(-1).tolist()
        for row, token in zip(tokens, chosen, strict=True):
            row.append(token)
        new = {request: [token] for request, token in zip(requests, chosen, strict=True)}
    return tokens, sizes


if __name__ == "__main__":
    main()
