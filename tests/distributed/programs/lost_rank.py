"""A rank that is lost: in the middle of a forward, by standing still, or while it writes a dump."""

import ast
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from swa_compile.models.tensor_parallel import shard, shard_specs

from . import steps

LOST, CODE = 1, 17
armed = {"how": None}


@torch.library.custom_op("swa_test::may_fall", mutates_args=())
def may_fall(x: torch.Tensor) -> torch.Tensor:
    if armed["how"] == "exit":
        os._exit(CODE)
    if armed["how"] == "stall":
        store().wait(["gone"], timedelta(seconds=120))
        os._exit(CODE)
    return x.clone()


@may_fall.register_fake
def _(x):
    return torch.empty_like(x)


class Falling(nn.Module):
    """A linear layer in whose place a rank may fall."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(torch.ops.swa_test.may_fall(x))


def main(rank, how, dump_dir, seconds):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    config = steps.HybridConfig(**{**vars(steps.CONFIG), "layers": ("full", "swa")})
    model, pool = steps.whole_model(shard_specs(config.layer_specs(), ranks), config)
    shard(model, group)
    model.layers[1].up = Falling(model.layers[1].up)
    options = {"dump_dir": f"{dump_dir}/{rank}"}
    compiled = torch.compile(model, backend="swa_eager", fullgraph=True, options=options)
    if how == "dump":
        if rank == LOST:
            fall_while_writing("01-hoisted.py")
        shorten(group, seconds)
        return survive(lambda: steps.run(compiled, pool, prepare=steps.marked))
    requests = [pool.open() for _ in range(3)]
    first, second, *_ = steps.steps()
    steps.run(compiled, pool, [first], steps.marked, requests)
    dist.barrier()
    shorten(group, seconds)
    if rank == LOST:
        armed["how"] = how
    return survive(lambda: steps.run(compiled, pool, [second], steps.marked, requests))


def survive(run):
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        took = time.monotonic() - start
        told = {"error": f"{type(error).__name__}: {error}", "seconds": took}
    else:
        told = {"error": None}
    store().add("gone so far", 1)
    if store().add("gone so far", 0) == dist.get_world_size() - 1:
        store().set("gone", "")
    return {**told, "group_is_broken": True}


def fall_while_writing(name):
    replace = os.replace

    def fall(part, path):
        if Path(path).name == name:
            os._exit(CODE)
        replace(part, path)

    os.replace = fall


def shorten(group, seconds):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def store():
    return dist.distributed_c10d._get_default_store()


def whole_files(folder):
    """The names below `folder` that a reader would open, each read through; and the others."""
    names, hidden = [], []
    for file in sorted(Path(folder).rglob("*")):
        if file.is_dir():
            continue
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            hidden.append(file.name)
            continue
        text = file.read_text()
        if file.suffix == ".py":
            assert isinstance(ast.parse(text).body[-1], ast.ClassDef), file
            assert "return " in text.splitlines()[-1] or "return " in text.splitlines()[-2], file
        elif file.suffix == ".json":
            json.loads(text)
        elif file.suffix == ".html":
            assert text.rstrip().endswith("</html>"), file
        elif file.name.startswith("diff-"):
            assert text.endswith("\n"), file
        else:
            assert text.splitlines()[-1].strip().startswith("total"), file
        names.append(file.name)
    return names, hidden
