"""A variant is compared with eager code before it is timed: its outputs, and every cache row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swa_compile.bench.inputs import Setting

# Largest relative error (2-norm) of one row. Rounding differs where kernels are fused, and adds up
# over the layers; a row that is stale or of another token is off by about 1.4.
TOLERANCE = {torch.bfloat16: 0.08, torch.float32: 1e-3}

# The batches that are compared: a graph that holds on to the first one is wrong in the second.
_SEEDS = (1, 0)


class WrongVariant(Exception):
    """A variant does not compute what eager code computes."""


@dataclass(frozen=True)
class Checked:
    """Largest relative errors of a row of the output, and of a written row of a cache."""

    output: float
    rows: float
    tolerance: float


@dataclass(frozen=True)
class _Outcome:
    """What eager code gave for one batch, in float32: output, and the rows written, by cache."""

    output: Tensor
    rows: list[tuple[Tensor, Tensor]]


class Oracle:
    """Eager code, translated in each layer, is what every variant has to agree with.

    Keeps a copy of all caches as they were, so that a row written where none should be is seen.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        decoder = setting.decoder
        self._before = [
            tuple(cache.clone() for cache in decoder.caches(i)) for i in range(len(decoder.kinds))
        ]
        self._outcomes: dict[int, _Outcome] = {}
        for seed in _SEEDS:
            self._outcomes[seed] = self._run(lambda: decoder(setting.x, setting.batch), seed)

    def check(self, step: Callable[[], Tensor]) -> Checked:
        """Run `step` on each batch and compare; the caches and the batch of seed 0 are left.

        Raises:
            WrongVariant: naming what differs, and where.
        """
        tolerance = TOLERANCE[self.setting.config.dtype]
        worst_output = worst_row = 0.0
        for seed, want in self._outcomes.items():
            got = self._run(step, seed)
            error, at = _worst(got.output, want.output)
            if not error <= tolerance:
                raise WrongVariant(
                    f"batch {seed}: output of request {at} is off by {error:.2g} of its norm "
                    f"(tolerance {tolerance:g})"
                )
            worst_output = max(worst_output, error)
            for i, pair in enumerate(zip(got.rows, want.rows, strict=True)):
                for name, g, w in zip("KV", *pair, strict=True):
                    error, at = _worst(g, w)
                    if not error <= tolerance:
                        raise WrongVariant(
                            f"batch {seed}: {name} of layer {i}, the row that request {at} writes, "
                            f"is off by {error:.2g} of its norm (tolerance {tolerance:g})"
                        )
                    worst_row = max(worst_row, error)
        return Checked(worst_output, worst_row, tolerance)

    def _run(self, step: Callable[[], Tensor], seed: int) -> _Outcome:
        """`step` on the batch of `seed` and on untouched caches.

        Raises:
            WrongVariant: it changed a row that it had no business with.
        """
        setting = self.setting
        setting.load(seed)
        self._restore()
        output = step().float().clone()
        written = setting.written()
        rows = []
        for i, kind in enumerate(setting.decoder.kinds):
            caches = setting.decoder.caches(i)
            for name, cache, before in zip("KV", caches, self._before[i], strict=True):
                same = (_bits(cache) == _bits(before)).flatten(1).all(1)
                same[written[kind]] = True
                same[0] = True  # the sink: what it holds is unspecified
                if not bool(same.all()):
                    row = int((~same).nonzero()[0])
                    raise WrongVariant(
                        f"batch {seed}: {name} of layer {i} ({kind}): row {row} changed, and no "
                        "token of the batch belongs there"
                    )
            k, v = (cache[written[kind]].float() for cache in caches)
            rows.append((k, v))
        return _Outcome(output, rows)

    def _restore(self) -> None:
        for i, before in enumerate(self._before):
            for cache, values in zip(self.setting.decoder.caches(i), before, strict=True):
                cache.copy_(values)


def _bits(cache: Tensor) -> Tensor:
    """NaN is equal to itself, bit by bit."""
    return cache.view(torch.int16 if cache.itemsize == 2 else torch.int32)


def _worst(got: Tensor, want: Tensor) -> tuple[float, int]:
    """The largest relative error of a row, and which row; NaN counts as the largest."""
    error = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-6)
    error = torch.where(error.isnan(), torch.inf, error)
    return float(error.max()), int(error.argmax())
