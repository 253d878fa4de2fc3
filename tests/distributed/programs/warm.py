"""Imported by the fork server: what every rank would otherwise load and warm up by itself."""

import torch
import torch.distributed.tensor.parallel
from torch._inductor import compile_fx

import swa_compile

from . import steps

torch.set_num_threads(1)
config = steps.HybridConfig(**{**vars(steps.CONFIG), "layers": ("swa",)})
model, pool = steps.whole_model(config=config)
steps.run(torch.compile(model, backend="swa_eager"), pool, steps.steps(decode=0)[:1], steps.marked)
torch._dynamo.reset()
del compile_fx, swa_compile, model, pool
