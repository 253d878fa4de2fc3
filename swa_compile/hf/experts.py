"""Mixtures of experts that loop over their experts in Python.

Such a loop asks the router's result which experts to run, which does not compile whole.
transformers has the same computation as one grouped product (`grouped_mm`, an entry of its
`ExpertsInterface`), which most families use; the others have the same weights and are given it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.stand_ins import StandIn

# Relative difference that another order of the same sums explains.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_LOW_PRECISION_TOLERANCE = 0.05


class GroupedExperts(nn.Module):
    """The experts of `original`, as one grouped product each for up and down.

    Args:
        original: with `gate_up_proj` `[E, 2 I, H]`, `down_proj` `[E, H, I]`, `num_experts` and
            `_apply_gate`, as transformers lays experts out. Its weights are used where they are.
    """

    # What transformers' decorator writes on a class of this layout.
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.num_experts: int = original.num_experts
        # In a tuple: as a submodule it would stand twice in the model.
        self._original = (original,)

    @property
    def gate_up_proj(self) -> Tensor:
        return self._original[0].gate_up_proj

    @property
    def down_proj(self) -> Tensor:
        return self._original[0].down_proj

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self._original[0]._apply_gate(gate_up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[N, H]`: the weighted sum of `top_k_weights` `[N, K]` of the experts' outputs."""
        from transformers.integrations.moe import grouped_mm_experts_forward

        out: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out


def grouped_experts(model: nn.Module) -> list[StandIn]:
    """What stands in for the experts of `model` that loop in Python; none in most models.

    Raises:
        UnsupportedModel: there are experts that loop, and grouped they compute something else.
    """
    found = []
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            if _loops(module):
                one = StandIn(parent, child, GroupedExperts(module))
                _refuse_another_result(f"{name}.{child}", module, one.module)
                found.append(one)
    return found


def _loops(module: nn.Module) -> bool:
    """Whether these are experts in transformers' layout, without its interface."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)
        and hasattr(module, "num_experts")
        and hasattr(module, "_apply_gate")
        and not hasattr(module, "has_gate")
    )


@torch.no_grad()
def _refuse_another_result(name: str, module: nn.Module, grouped: nn.Module) -> None:
    experts: Any = module
    count, hidden = experts.num_experts, experts.gate_up_proj.shape[-1]
    weight = experts.down_proj
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(2 * count, hidden, generator=random)
    # Each expert is met, and some token has one twice.
    index = torch.stack([torch.arange(2 * count) % count, torch.arange(2 * count) // 2], 1)
    share = torch.rand(2 * count, 2, generator=random)
    arguments = (
        tokens.to(weight.device, weight.dtype),
        index.to(weight.device),
        share.to(weight.device, weight.dtype),
    )
    try:
        want, got = module(*arguments).float(), grouped(*arguments).float()
    except Exception as error:
        raise UnsupportedModel(
            f"its experts ({name}, {type(module).__name__}) are a Python loop, which does not "
            f"compile whole, and as a grouped product they fail: {type(error).__name__}: {error}"
        ) from error
    difference = float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))
    if not difference <= _TOLERANCE.get(weight.dtype, _LOW_PRECISION_TOLERANCE):
        raise UnsupportedModel(
            f"its experts ({name}, {type(module).__name__}) are a Python loop, which does not "
            f"compile whole, and as a grouped product they differ by {difference:.1e} of the "
            "largest value"
        )
