"""RoPE whose frequencies go by the length of the request.

transformers takes the longest request of a forward for the length of all: `longrope` (LongRoPE,
arXiv:2402.13753) has one set of factors up to `original_max_position_embeddings` tokens and another
beyond, `dynamic` (NTK-aware scaling) a base that grows with the length. Here each token has the
frequencies of its own request, so nothing depends on what runs beside it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.stand_ins import StandIn
from swa_compile.kv import ForwardBatch

BY_LENGTH = ("longrope", "dynamic")


@dataclass
class RopeBatch(ForwardBatch):
    """A batch for a model whose RoPE goes by length."""

    rope_lengths: Tensor  # int64 [N]: tokens that the token's request is known to have; padding 0

    def pad(self, tokens: int, requests: int) -> RopeBatch:
        """As `ForwardBatch.pad`."""
        more = tokens - len(self.rope_lengths)
        padded = super().pad(tokens, requests)
        if padded is self:
            return self
        return RopeBatch(
            **vars(padded), rope_lengths=nn.functional.pad(self.rope_lengths, (0, more))
        )


# As a pytree it is an argument of compiled callables as a `ForwardBatch` is.
pytree.register_dataclass(RopeBatch)


class LengthRope(nn.Module):
    """Stands in for a rotary embedding. `lengths` is set ahead of each forward.

    Attributes:
        lengths: int64 `[N]`, of the request of each token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lengths: Tensor | None = None

    def frequencies(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse frequencies `[N, F]` and scale `[N, 1]`, float32, of tokens of such requests."""
        raise NotImplementedError

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[1, N, 2 F]` in the dtype of `x`."""
        assert self.lengths is not None
        inverse, scale = self.frequencies(self.lengths)
        angles = position_ids[0].float()[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)[None]
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


class LongRope(LengthRope):
    """One set of frequencies up to `border` tokens, another beyond.

    Args:
        border: `original_max_position_embeddings`.
        short, long: inverse frequencies, float32 `[F]`, and the scale.
    """

    short: Tensor
    long: Tensor

    def __init__(
        self, border: int, short: tuple[Tensor, float], long: tuple[Tensor, float]
    ) -> None:
        super().__init__()
        self.border = border
        self.scales = short[1], long[1]
        self.register_buffer("short", short[0], persistent=False)
        self.register_buffer("long", long[0], persistent=False)

    def frequencies(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        beyond = (lengths > self.border)[:, None]
        short, long = (torch.full_like(self.short[:1], scale) for scale in self.scales)
        return torch.where(beyond, self.long, self.short), torch.where(beyond, long, short)


class DynamicRope(LengthRope):
    """A base that grows with the length beyond `border` tokens.

    base(L) = base (factor L / border - (factor - 1)) ** (dim / (dim - 2)), as
    `transformers.modeling_rope_utils` has it.

    Args:
        border: `max_position_embeddings`.
        base: `rope_theta`. factor: of `rope_parameters`.
        frequencies: F, half the dimensions that are rotated.
    """

    exponents: Tensor

    def __init__(
        self, border: int, base: float, factor: float, frequencies: int, device: torch.device
    ) -> None:
        super().__init__()
        self.border, self.base, self.factor = border, base, factor
        self.dim = 2 * frequencies
        exponents = torch.arange(0, self.dim, 2, device=device).float() / self.dim
        self.register_buffer("exponents", exponents, persistent=False)

    def frequencies(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        grown = self.factor * lengths.clamp_min(self.border) / self.border - (self.factor - 1)
        base = self.base * grown[:, None] ** (self.dim / (self.dim - 2))
        return 1.0 / base**self.exponents, torch.ones_like(base)


class LayerRopes(nn.Module):
    """Stands in for a rotary embedding with RoPE by kind of layer.

    Args:
        original: for kinds that do not go by length.
        ropes: by kind, for the others.
    """

    def __init__(self, original: nn.Module, ropes: dict[str, LengthRope]) -> None:
        super().__init__()
        self.original = original
        self.ropes = nn.ModuleDict(ropes)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Any:
        """Cosines and sines for layers of that kind."""
        if layer_type in self.ropes:
            return self.ropes[layer_type](x, position_ids)
        return self.original(x, position_ids, layer_type)


def length_ropes(model: nn.Module) -> list[StandIn]:
    """What stands in for the rotary embeddings of `model` that go by length; none in most models.

    Raises:
        UnsupportedModel: there is one that cannot be told by the request.
    """
    found = []
    for parent in model.modules():
        for name, module in parent.named_children():
            kind = getattr(module, "rope_type", None)
            if isinstance(kind, dict):
                ropes = {
                    layer: _Embedding(module, layer).by_length(one)
                    for layer, one in kind.items()
                    if one in BY_LENGTH
                }
                if ropes:
                    found.append(StandIn(parent, name, LayerRopes(module, ropes)))
            elif kind in BY_LENGTH:
                found.append(StandIn(parent, name, _Embedding(module).by_length(kind)))
    return found


class _Embedding:
    """A rotary embedding of transformers, or its part for one kind of layer, to be asked."""

    def __init__(self, module: Any, layer: str | None = None) -> None:
        self.module, self.layer = module, layer
        self.name = type(module).__name__ if layer is None else f"{type(module).__name__} ({layer})"
        parameters = module.config.rope_parameters
        self.parameters = parameters if layer is None else parameters[layer]
        self.original: Tensor = self.frequencies(module, "original_inv_freq")

    def frequencies(self, module: Any, name: str) -> Tensor:
        found: Tensor = getattr(module, name if self.layer is None else f"{self.layer}_{name}")
        return found

    def by_length(self, kind: str) -> LengthRope:
        """What stands in for it, and agrees with it on each side of the border."""
        candidates: list[LengthRope] = []
        if kind == "longrope":
            border = self.parameters["original_max_position_embeddings"]
            short, long = (self.at(length) for length in (border, border + 1))
            for name in ("inv_freq", "original_inv_freq"):  # not all use the one that is updated
                ends = [
                    (self.frequencies(module, name).float(), float(cosines[0, 0, 0]))
                    for module, (cosines, *_) in (short, long)
                ]
                candidates.append(LongRope(border, *ends))
        else:
            border = self.module.original_max_seq_len
            base, factor = self.parameters["rope_theta"], self.parameters["factor"]
            count, device = self.original.numel(), self.original.device
            candidates.append(DynamicRope(border, base, factor, count, device))
        lengths = [min(3, border), border, border + 1, 2 * border + 3]
        for candidate in candidates:
            if all(self._is(candidate, length) for length in lengths):
                return candidate
        raise UnsupportedModel(
            f"RoPE of type '{kind}' is chosen by the longest request of the forward, and "
            f"{self.name} computes it in a way that cannot be told by the request"
        )

    @torch.no_grad()
    def at(self, length: int) -> tuple[Any, Any]:
        """What it gives at `_places(length)`, and its state then."""
        own = copy.deepcopy(self.module)
        # The model may have met a longer request before, and have kept its frequencies.
        prefix = "" if self.layer is None else f"{self.layer}_"
        setattr(own, f"{prefix}max_seq_len_cached", own.original_max_seq_len)
        setattr(own, f"{prefix}inv_freq", self.original)
        places, kinds = _places(length, self.original.device), [self.layer] * bool(self.layer)
        return own, own(torch.empty(1, device=places.device), places[None], *kinds)

    def _is(self, candidate: LengthRope, length: int) -> bool:
        want = self.at(length)[1]
        places = _places(length, self.original.device)
        candidate.lengths = torch.full_like(places, length)
        try:
            got = candidate(torch.empty(1, device=places.device), places[None])
        finally:
            candidate.lengths = None
        return isinstance(want, tuple) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            for a, b in zip(got, want, strict=True)
        )


def _places(length: int, device: torch.device) -> Tensor:
    """Positions, of which the last is that of a request of `length` tokens."""
    return torch.tensor([0, 1, length // 2, length - 1], device=device)
