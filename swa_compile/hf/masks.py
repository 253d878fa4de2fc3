"""Which keys a query sees, read off the mask that a model makes for its own eager attention.

It is the one source that cannot be wrong: the configuration's `layer_types` and the keyword
`sliding_window` of the attention call are missing or untrue in some families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A window of more tokens than this is taken for full attention.
_LONGEST = 2**21

# (batch, head, query, key) -> whether the query sees the key; element-wise over tensors.
MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """The form of a mask.

    Attributes:
        kind: "full", "sliding" (a window of `size` keys), "chunked" (chunks of `size`), or what
            the mask is instead, in words.
        size: of the window or the chunks.
    """

    kind: str
    size: int | None = None


def form_of(mask: MaskFunction, horizon: int, device: torch.device | str = "cpu") -> Form:
    """The form of `mask`, asked about positions up to `horizon`.

    Args:
        horizon: more than twice the largest size that a window or a chunk could have.
        device: of the model: some masks hold tensors on it.
    """
    positions = torch.arange(min(horizon, _LONGEST), device=device)
    first = positions[:1]
    if _sees(mask, first, positions[1:]).any():
        return Form("not causal")
    sees_first = _sees(mask, positions, first)
    if sees_first.all():
        return Form("full") if _is(mask, positions, "full", 0) else Form("of an unknown form")
    size = int(sees_first.long().argmin())  # the first query that does not see key 0
    for kind in ("sliding", "chunked"):
        if _is(mask, positions, kind, size):
            return Form(kind, size)
    return Form("of an unknown form")


def _is(mask: MaskFunction, positions: Tensor, kind: str, size: int) -> bool:
    """Whether whole rows of the mask, early and late ones, are those of `kind`."""
    last = len(positions) - 1
    queries = {0, 1, last // 2, last} | {size + d for d in (-1, 0, 1)} | {2 * size + 1}
    for query in sorted(q for q in queries if 0 <= q <= last):
        low = {"full": 0, "sliding": query - size + 1, "chunked": query - query % max(size, 1)}
        wanted = (positions >= low[kind]) & (positions <= query)
        if not torch.equal(_sees(mask, positions[query : query + 1], positions), wanted):
            return False
    return True


def _sees(mask: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    seen = torch.as_tensor(mask(0, 0, queries, keys))
    shape = torch.broadcast_shapes(queries.shape, keys.shape)
    return seen.expand(shape).bool().to(queries.device)


class FormRecorder:
    """A mask function for transformers that measures masks instead of making them.

    What it returns is constant and names the form, so that the attention function can tell which
    mask a layer was given, also where the model has sliced it.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.forms: list[Form] = []

    def __call__(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **rest: Any
    ) -> Tensor:
        dtype, device = rest.get("dtype", torch.float32), rest.get("device", "cpu")
        self.forms.append(form_of(mask_function, self.horizon, device))
        shape = (batch_size, 1, q_length, kv_length)
        return torch.full(shape, -float(len(self.forms)), dtype=dtype, device=device)

    def form(self, mask: Tensor | None) -> Form | None:
        """The form of a mask that was returned; None where it was not, or was changed since."""
        if mask is None or not mask.numel() or not bool((mask == mask.flatten()[0]).all()):
            return None
        number = -float(mask.flatten()[0])
        if number != int(number) or not 1 <= number <= len(self.forms):
            return None
        return self.forms[int(number) - 1]
