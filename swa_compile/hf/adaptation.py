"""What is done to a model for the duration of a forward, so that it runs over a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from swa_compile.hf.attention import NAME
from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.experts import grouped_experts
from swa_compile.hf.paged_scorer import paged_scorers
from swa_compile.hf.registration import attached, configurations
from swa_compile.hf.rope import LengthRope, LongRope, length_ropes
from swa_compile.hf.stand_ins import standing_in
from swa_compile.hf.token_positions import TokenPositions


class Adaptation:
    """How a model is called so that each token has what its own request gives it.

    Args:
        model: of transformers; nothing of it is changed but inside `attached`.

    Attributes:
        configs: the configurations that name its attention.
        stand_ins: what stands in for parts of it.
        ropes: those of them that are to be told the length of each token's request.
        restart_at: a request that grows past so many tokens begins anew, all its keys being
            other ones from there on; None where there is no such border.

    Raises:
        UnsupportedModel: a part of it cannot be replaced by one that computes the same.
    """

    def __init__(self, model: Any) -> None:
        self.configs = configurations(model)
        ropes = length_ropes(model)
        self.stand_ins = [*ropes, *grouped_experts(model), *paged_scorers(model)]
        parts = [part for one in ropes for part in one.module.modules()]
        self.ropes = [part for part in parts if isinstance(part, LengthRope)]
        borders = {rope.border for rope in self.ropes if isinstance(rope, LongRope)}
        if len(borders) > 1:
            raise UnsupportedModel(
                f"RoPE of type 'longrope' has several borders: {sorted(borders)}"
            )
        self.restart_at = min(borders, default=None)
        config = model.config.get_text_config()
        self._counts_positions = bool(getattr(config, "attn_temperature_tuning", False))

    @contextmanager
    def attached(self, name: str = NAME) -> Iterator[None]:
        """Inside the block the model attends through `name`, with what stands in for its parts."""
        with attached(self.configs, name), standing_in(self.stand_ins):
            yield

    def keywords(self, positions: Tensor, rope_lengths: Tensor | None) -> dict[str, Any]:
        """What the model is called with, beside ids and positions, and what is told its parts.

        Args:
            positions: int64 `[N]`.
            rope_lengths: int64 `[N]`; None for a model whose RoPE does not go by length.
        """
        for rope in self.ropes:
            rope.lengths = rope_lengths
        if self._counts_positions:
            return {"past_key_values": TokenPositions(positions)}
        return {}

    def release(self) -> None:
        """Forget the tensors of a forward."""
        for rope in self.ropes:
            rope.lengths = None
