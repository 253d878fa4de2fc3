"""The ways to run a decode step: what one could do without this package, and with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from swa_compile.bench.graphs import captured
from swa_compile.bench.inputs import Setting
from swa_compile.bench.model import aten, by_hand, natural, store_aten
from swa_compile.kv import ForwardBatch
from swa_compile.ops import store_kv
from swa_compile.runner import BucketRunner

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        name: what `--variants` calls it; `letter`: what targets.md calls it.
        about: one line for tables.
        way, store: where indices come from, and how rows are stored (see `model`).
        backend: of `torch.compile`; None for eager code.
        options: of that backend.
        capture: captured by us as one CUDA graph; otherwise the compiled callable sees to it.
        runner: called through a `BucketRunner` of one bucket, which captures.
    """

    name: str
    letter: str
    about: str
    way: Callable[..., Any] = natural
    store: Callable[..., None] = store_kv
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    capture: bool = True
    runner: bool = False

    def forward(self, setting: Setting) -> Callable[[Tensor, ForwardBatch], Tensor]:
        """The step as a user would write it, not compiled."""
        decoder, way, store = setting.decoder, self.way, self.store

        def forward(x: Tensor, batch: ForwardBatch) -> Tensor:
            return decoder(x, batch, way, store)

        # Dynamo keeps compiled code by code object: with one for all variants, a call of one would
        # first try the guards of the others.
        code = forward.__code__.replace(co_name=f"step_{self.name.replace('-', '_')}")
        return FunctionType(code, globals(), code.co_name, None, forward.__closure__)


_PIECEWISE = {
    "triton.cudagraphs": True,
    "graph_partition": True,
    "custom_should_partition_ops": ["swa::paged_attention"],
}

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("eager", "a", "eager, translated in each layer; one CUDA graph"),
        Variant("eager-hoisted", "b", "eager, hoisted by hand; one CUDA graph", by_hand),
        Variant(
            "inductor",
            "c",
            "torch.compile, opaque operators in each layer; one CUDA graph",
            backend="inductor",
        ),
        Variant(
            "inductor-aten",
            "d",
            "torch.compile, mapping[loc] and index_put_ in each layer; one CUDA graph",
            aten,
            store_aten,
            "inductor",
        ),
        Variant(
            "inductor-hoisted",
            "e",
            "torch.compile, hoisted by hand, opaque store; one CUDA graph",
            by_hand,
            backend="inductor",
        ),
        Variant(
            "inductor-piecewise",
            "f",
            "as (e), cut at attention; torch's own cudagraph trees",
            by_hand,
            backend="inductor",
            options=_PIECEWISE,
            capture=False,
        ),
        Variant(
            "swa",
            "ours",
            'backend="swa", cudagraphs="off"; one CUDA graph',
            backend="swa",
            options={"cudagraphs": "off"},
        ),
        Variant(
            "swa-runner",
            "ours",
            "the same in a BucketRunner, which copies inputs to where it captured them",
            backend="swa",
            options={"cudagraphs": "off"},
            capture=False,
            runner=True,
        ),
        Variant(
            "swa-full",
            "ours",
            'backend="swa", cudagraphs="full"',
            backend="swa",
            options={"cudagraphs": "full"},
            capture=False,
        ),
        Variant(
            "swa-piecewise",
            "ours",
            'backend="swa", cudagraphs="piecewise"',
            backend="swa",
            options={"cudagraphs": "piecewise"},
            capture=False,
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Variant]:
    """Variants by name or letter, in the order of `VARIANTS`; none given: all.

    Raises:
        ValueError: there is no such variant.
    """
    known = set(VARIANTS) | {variant.letter for variant in VARIANTS.values()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)} "
            "(or the letters a to f)"
        )
    wanted = set(names) or known
    return [v for v in VARIANTS.values() if v.name in wanted or v.letter in wanted]


class NotHere(Exception):
    """A variant that cannot run here: `kind` is "no GPU" or "not available", the text says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def require_available(variant: Variant, device: torch.device) -> None:
    """Raise `NotHere` where `variant` cannot run on `device` in this version."""
    if device.type != "cuda" and not variant.capture:
        raise NotHere("no GPU", "CUDA graphs want a GPU")
    if variant.backend == "swa":
        from swa_compile.inductor import config_patches
        from swa_compile.options import Options
        from swa_compile.passes import OptionError

        try:
            config_patches(Options.of(dict(variant.options)))
        except OptionError as error:
            raise NotHere("not available", str(error)) from error


def compiled(variant: Variant, setting: Setting) -> Step:
    """The step behind `torch.compile`, not yet called; eager code where the variant is that."""
    forward = _compiled(variant, setting)
    x, batch = setting.x, setting.batch
    return lambda: forward(x, batch)


def _compiled(variant: Variant, setting: Setting) -> Callable[[Tensor, ForwardBatch], Tensor]:
    forward = variant.forward(setting)
    if variant.backend is not None:
        forward = torch.compile(
            forward,
            backend=variant.backend,
            options=dict(variant.options) or None,
            fullgraph=True,
            dynamic=False,
        )
    return forward


class _Model(nn.Module):
    """Compiled code and the module whose weights and caches it reads, for a `BucketRunner`."""

    def __init__(self, decoder: nn.Module, forward: Callable[[Tensor, ForwardBatch], Tensor]):
        super().__init__()
        self.decoder, self.compiled = decoder, forward

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        return self.compiled(x, ForwardBatch(**named))


def _in_a_runner(variant: Variant, setting: Setting) -> Step:
    """The step as an engine calls it: batches of any size, here always of the bucket's."""
    model = _Model(setting.decoder, _compiled(variant, setting))
    runner = BucketRunner(model, [setting.shape.batch], dynamic=False, progress=False)
    named = {f.name: getattr(setting.batch, f.name) for f in fields(setting.batch)}

    def step() -> Tensor:
        out: Tensor = runner(x=setting.x, **named)
        return out

    return step


def prepare(variant: Variant, setting: Setting) -> Step:
    """The step, compiled, warm and captured: what is timed.

    Raises:
        NotHere: it cannot run here.
    """
    device = setting.x.device
    require_available(variant, device)
    step = _in_a_runner(variant, setting) if variant.runner else compiled(variant, setting)
    step()
    if device.type != "cuda":
        return step
    return captured(step) if variant.capture else _warm(step)


def _warm(step: Step) -> Step:
    for _ in range(4):  # cudagraph trees warm up, record, and replay from the third call on
        step()
    torch.cuda.synchronize()
    return step
