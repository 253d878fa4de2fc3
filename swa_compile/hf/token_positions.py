"""Positions for layers that count them from a cache's length."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenPositions:
    """Stands where a model looks for its cache, and holds positions alone.

    Llama 4's layers without RoPE scale each query by its position (`attn_temperature_tuning`),
    which they count as `arange(N) + past_key_values.get_seq_length()`. With a length for each token
    that sum is the position of each token, whichever request it belongs to.

    Args:
        positions: int64 `[N]`, of the tokens of one forward.
    """

    def __init__(self, positions: Tensor) -> None:
        self._offsets = positions - torch.arange(positions.shape[0], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """What each token's position has to be counted from, int64 `[N]`."""
        return self._offsets

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they came: the attention function stores them."""
        return key_states, value_states

    # What a mask is made by, as if there were no cache.

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
