"""What every rank runs around its program: output to a file, the group, the result to a file."""

import faulthandler
import importlib
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

rank, shared = globals()["RANK"], globals()["SHARED"]
folder, ranks = Path(shared["folder"]), shared["ranks"]

printed = open(folder / f"rank-{rank}.txt", "w", buffering=1)  # noqa: SIM115 - until the process ends
os.dup2(printed.fileno(), 1)
os.dup2(printed.fileno(), 2)
sys.stdout = sys.stderr = printed
faulthandler.enable(printed)
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))

if shared["device"] == "cuda":
    torch.cuda.set_device(rank)
# A file as the store: no port is opened for it. Gloo's own are ephemeral and end with the process.
dist.init_process_group(
    "nccl" if shared["device"] == "cuda" else "gloo",
    store=dist.FileStore(str(folder / "store"), ranks),
    rank=rank,
    world_size=ranks,
    timeout=timedelta(seconds=shared["group_timeout"]),
)
program = importlib.import_module("programs." + shared["program"])
result = program.main(rank, **shared["arguments"])
(folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(result))
if result is None or not (isinstance(result, dict) and result.get("group_is_broken")):
    dist.barrier()
    dist.destroy_process_group()
printed.flush()
os._exit(0)  # not to be held up by threads of a group that another rank left
