"""What each layer of a model does, seen by running it on a few tokens.

Nothing here asks for a model's name. A first run measures the masks and the geometry of every
attention call. Further runs look whether a token's queries, keys and values depend on anything but
its id, its position and what the attention function gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swa_compile.hf.adaptation import Adaptation
from swa_compile.hf.attention import KEYWORD, Call, NotAttended
from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.masks import Form, FormRecorder
from swa_compile.hf.position_table import PLACES, TableLengths
from swa_compile.hf.registration import MEASURING, measuring

# Relative difference of a query, key or value that other sizes of the same matrix products explain.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass
class Seen:
    """One attention call, and the form of the mask that came with it."""

    call: Call
    form: Form | None


class SelfOnly:
    """Attention in which each token sees itself alone; records the calls."""

    def __init__(self, recorder: FormRecorder | None = None) -> None:
        self.recorder = recorder
        self.seen: dict[int, Seen] = {}

    def attend(self, call: Call) -> Tensor:
        layer = getattr(call.module, "layer_idx", None)
        name = type(call.module).__name__
        if not isinstance(layer, int):
            raise UnsupportedModel(f"{name} has no layer_idx, by which its cache would be found")
        if layer in self.seen:
            raise UnsupportedModel(f"layer {layer} ({name}) attends twice in one forward")
        if call.query.shape[0] != 1 or call.key.shape[2] != call.query.shape[2]:
            raise UnsupportedModel(
                f"layer {layer} ({name}) attends to {call.key.shape[2]} keys where there are "
                f"{call.query.shape[2]} tokens: it makes keys of its own"
            )
        form = None if self.recorder is None else self.recorder.form(call.mask)
        self.seen[layer] = Seen(call, form)
        groups = call.query.shape[1] // call.value.shape[1]
        return call.value[0].transpose(0, 1).repeat_interleave(groups, dim=1)


def measured_calls(model: Any, adaptation: Adaptation, horizon: int) -> dict[int, Seen]:
    """The attention calls of a forward of two tokens, by layer, with the forms of their masks."""
    recorder = FormRecorder(horizon)
    attend = SelfOnly(recorder)
    try:
        with measuring(recorder), adaptation.attached(MEASURING):
            _run(model, adaptation, attend, [3, 5], [0, 1])
    except UnsupportedModel:
        raise
    except NotAttended as error:
        raise UnsupportedModel(
            "it does not hand its keyword arguments on to its attention layers"
        ) from error
    except Exception as error:
        raise UnsupportedModel(
            f"a forward of two tokens through it failed: {type(error).__name__}: {error}"
        ) from error
    return attend.seen


def positions_known(model: Any, adaptation: Adaptation) -> int | None:
    """Positions that `model` has rows for, where it looks them up; None where it computes them."""
    lengths = TableLengths()
    with adaptation.attached(), lengths:
        _run(model, adaptation, SelfOnly(), [3] * len(PLACES), list(PLACES))
    return lengths.shortest


def refuse_other_paths(model: Any, adaptation: Adaptation, last_position: int) -> None:
    """Raise where tokens act on each other by another path than the attention function.

    Convolutions, recurrences, linear attention and positions that are counted and not handed in
    all show as a query, key, value or logit that is another one when other tokens stand in the
    forward.

    Args:
        last_position: the last that the model was made for.

    Raises:
        UnsupportedModel: naming the first layer in which it shows.
    """
    tokens = [(3, 0), (5, 1), (7, 0), (5, last_position), (3, 2)]
    together = _trace(model, adaptation, tokens)
    for row, token in enumerate(tokens):
        alone = _trace(model, adaptation, [token])
        for name, values in together.items():
            got, want = values[row].double(), alone[name][0].double()
            scale = want.abs().max().clamp_min(1e-12)
            error = float((got - want).abs().max() / scale)
            if not error <= _TOLERANCE.get(values.dtype, 0.1):
                raise UnsupportedModel(
                    f"{name} of a token depends on the other tokens of the forward (a relative "
                    f"difference of {error:.1e}) although each saw itself alone: something mixes "
                    "tokens outside the attention function, or counts positions itself"
                )


def _trace(
    model: Any, adaptation: Adaptation, tokens: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """Queries, keys and values of each layer and the logits, tokens first."""
    attend = SelfOnly()
    with adaptation.attached():
        logits = _run(model, adaptation, attend, [i for i, _ in tokens], [p for _, p in tokens])
    values = {}
    for layer, seen in attend.seen.items():
        module = type(seen.call.module).__name__
        for name in ("query", "key", "value"):
            tensor = getattr(seen.call, name)[0].transpose(0, 1)
            values[f"{name} in layer {layer} ({module})"] = tensor
    return {**values, "the logits": logits}


@torch.no_grad()
def _run(
    model: Any, adaptation: Adaptation, attend: SelfOnly, ids: list[int], positions: list[int]
) -> Tensor:
    """Logits `[N, vocab]`."""
    device = model.device
    places = torch.tensor(positions, device=device)
    out = model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=places[None],
        use_cache=False,
        **adaptation.keywords(places, places + 1),
        **{KEYWORD: attend},
    )
    adaptation.release()
    logits: Tensor = out.logits[0]
    return logits
