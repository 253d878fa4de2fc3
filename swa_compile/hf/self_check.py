"""A model over its pool against its own eager attention, for families that no test knows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.registration import attached

if TYPE_CHECKING:
    from swa_compile.hf.bridge import Bridge

# Largest difference of a logit, relative to the largest logit, that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.05

# Tokens past the largest window; the last ones are decoded one by one.
_PAST = 24
_DECODED = 8


@torch.no_grad()
def compare_with_eager(bridge: Bridge) -> None:
    """Run one random sequence past the window both ways and compare the logits.

    Raises:
        UnsupportedModel: with the measured difference.
    """
    model = bridge.model
    windows = [layer.spec.window or 0 for layer in bridge.layers]
    length = min(max(windows) + _PAST, bridge.positions or sys.maxsize)
    last = min(_DECODED, length - 1)
    random = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (length,), generator=random)
    with attached(bridge.adaptation.configs, "eager"):
        positions = torch.arange(length, device=model.device)[None]
        out = model(input_ids=ids[None].to(model.device), position_ids=positions, use_cache=False)
    # Cut here: not every forward knows `logits_to_keep`, which then is one more thing to check.
    want = out.logits[0, -last - 1 :].float()

    pool = bridge.make_pool(max_tokens=length, max_requests=1)
    request = pool.open()

    def forward(piece: list[int]) -> Tensor:
        # The eager forward has all tokens at once, so that is the length it goes by.
        batch = bridge.batch(pool, [(request, piece)], [length])
        return bridge.forward(batch, pool)[0].float()

    prompt, decoded = ids[: length - last].tolist(), ids[length - last :].tolist()
    start, got = 0, []
    while start < len(prompt):
        step = min(len(prompt) - start, max([*windows, 1]) if any(windows) else 256)
        step = min(step, pool.piece_bound(request) or step)
        logits = forward(prompt[start : start + step])
        start += step
    got.append(logits)
    got += [forward([token]) for token in decoded]

    error = float((torch.stack(got) - want).abs().max() / want.abs().max().clamp_min(1e-12))
    allowed = _TOLERANCE.get(bridge.dtype, _LOW_PRECISION_TOLERANCE)
    if not error <= allowed:
        raise UnsupportedModel(
            f"over the pool its logits differ from those of its own eager attention by {error:.1e} "
            f"of the largest (rounding explains {allowed:.0e}), on {length} random tokens"
        )
