"""A variant is compared with eager code before it is timed: its outputs, and every cache row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swa_compile.bench.inputs import Setting
from swa_compile.bench.rounding import Rows, in_float32

# Largest relative error (2-norm) of one row in float32, where rounding is far below it.
_TOLERANCE_FLOAT32 = 1e-3

# A row that is stale, or of another token, is off by about 1.4: this far below it is told apart.
_TOO_COARSE = 0.5

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
    rows: Rows


class Oracle:
    """Eager code, translated in each layer, is what every variant has to agree with.

    Keeps a copy of all caches as they were, so that a row written where none should be is seen.

    Attributes:
        rounding: largest relative error of a row of eager code against float32; 0.0 in float32.
        tolerance: by how much a row may differ. In bfloat16 twice `rounding`: a variant rounds at
            other places than eager code, not more often, and both may be off in opposite ways.

    Raises:
        ValueError: rounding is so coarse in this model that a wrong row would go unseen.
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
        self.rounding, self.tolerance = 0.0, _TOLERANCE_FLOAT32
        if setting.config.dtype != torch.float32:
            self.rounding = max(map(self._rounding, _SEEDS))
            self.tolerance = 2 * self.rounding
        if not self.tolerance <= _TOO_COARSE:
            raise ValueError(
                f"config {setting.config.name!r}: rounding alone puts a row off by "
                f"{self.rounding:.2g} of its norm; a wrong row would go unseen"
            )

    def check(self, step: Callable[[], Tensor]) -> Checked:
        """Run `step` on each batch and compare; the caches and the batch of seed 0 are left.

        Raises:
            WrongVariant: naming what differs, and where.
        """
        tolerance = self.tolerance
        worst_output = worst_row = 0.0
        for seed, want in self._outcomes.items():
            got = self._run(step, seed)
            if got.output.shape != want.output.shape:
                raise WrongVariant(
                    f"batch {seed}: the output has shape {tuple(got.output.shape)}, and not "
                    f"{tuple(want.output.shape)}"
                )
            error, at = _worst(got.output, want.output)
            if not error <= tolerance:
                raise WrongVariant(
                    f"batch {seed}: output of request {at} is off by {error:.2g} of its norm "
                    f"(tolerance {tolerance:.2g})"
                )
            worst_output = max(worst_output, error)
            for i, pair in enumerate(zip(got.rows, want.rows, strict=True)):
                for name, g, w in zip("KV", *pair, strict=True):
                    error, at = _worst(g, w)
                    if not error <= tolerance:
                        raise WrongVariant(
                            f"batch {seed}: {name} of layer {i}, the row that request {at} writes, "
                            f"is off by {error:.2g} of its norm (tolerance {tolerance:.2g})"
                        )
                    worst_row = max(worst_row, error)
        return Checked(worst_output, worst_row, tolerance)

    def _run(self, step: Callable[[], Tensor], seed: int) -> _Outcome:
        """`step` on the batch of `seed` and on untouched caches.

        Raises:
            WrongVariant: it changed a row that it had no business with, or its inputs.
        """
        setting = self.setting
        setting.load(seed)
        self._restore()
        loaded = {name: tensor.clone() for name, tensor in _inputs(setting).items()}
        written = setting.written()
        output = step().float().clone()
        for name, tensor in _inputs(setting).items():
            # The next call, which is timed and not compared, would read something else.
            if not torch.equal(tensor, loaded[name]):
                raise WrongVariant(f"batch {seed}: the input {name} was written")
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

    def _rounding(self, seed: int) -> float:
        """The largest relative error of a row that eager code gave for the batch of `seed`."""
        self.setting.load(seed)
        self._restore()
        output, rows = in_float32(self.setting)
        eager = self._outcomes[seed]
        errors = [_worst(eager.output, output)[0]]
        for got, want in zip(eager.rows, rows, strict=True):
            errors += [_worst(g, w)[0] for g, w in zip(got, want, strict=True)]
        return max(errors)

    def _restore(self) -> None:
        for i, before in enumerate(self._before):
            for cache, values in zip(self.setting.decoder.caches(i), before, strict=True):
                cache.copy_(values)


def _inputs(setting: Setting) -> dict[str, Tensor]:
    batch = {field.name: getattr(setting.batch, field.name) for field in fields(setting.batch)}
    return {"x": setting.x, **batch}


def _bits(cache: Tensor) -> Tensor:
    """NaN is equal to itself, bit by bit."""
    return cache.view(torch.int16 if cache.itemsize == 2 else torch.int32)


def _worst(got: Tensor, want: Tensor) -> tuple[float, int]:
    """The largest relative error of a row, and which row; NaN counts as the largest."""
    error = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-6)
    error = torch.where(error.isnan(), torch.inf, error)
    return float(error.max()), int(error.argmax())
