"""The operator `swa::run_rows`, which only the passes put into graphs: see `row_program`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import row_program
from .checks import Size
from .library import define, has_triton


def _check(written: Sequence[Tensor], inputs: Sequence[Tensor], program: str, tokens: Size) -> None:
    """Nothing comes back, so there is nothing to make; the passes vouch for the arguments."""
    del written, inputs, tokens
    row_program.read(program)


def _by_rule(
    written: Sequence[Tensor], inputs: Sequence[Tensor], program: str, tokens: int
) -> None:
    row_program.run(program, written, inputs, tokens)


def _on_gpu(written: Sequence[Tensor], inputs: Sequence[Tensor], program: str, tokens: int) -> None:
    if not has_triton():
        return _by_rule(written, inputs, program, tokens)
    from . import row_triton

    with torch.cuda.device(written[0].device):
        row_triton.run(program, written, inputs, tokens)


define(
    "run_rows(Tensor(a!)[] written, Tensor[] inputs, str program, SymInt tokens) -> ()",
    fake=_check,
    CPU=torch.no_grad()(_by_rule),
    CUDA=torch.no_grad()(_on_gpu),
)
