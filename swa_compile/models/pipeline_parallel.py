"""Consecutive layers of the reference model as a pipeline stage, with a pool of their own."""

from __future__ import annotations

from torch import Tensor, nn

from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.models.hybrid import HybridTransformer


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of `stage` of `stages`; the first stages get one more where it does not divide.

    Raises:
        ValueError: a stage would have no layer.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages")
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


class Stage(nn.Module):
    """Layers `own` of `model`: `forward(batch, x)` gives hidden states or, at the end, logits.

    Args:
        model: the whole model; the stage shares its weights.
        own: the layers of this stage, counted in the model.
        pool: made from the specs of these layers alone. Its caches are counted from 0 in each
            stage: layer `own[i]` of the model has cache i.
    """

    def __init__(self, model: HybridTransformer, own: range, pool: HybridKVPool) -> None:
        super().__init__()
        if len(pool.layers) != len(own):
            raise ValueError(f"a stage of {len(own)} layers was given {len(pool.layers)} caches")
        self.pool = pool
        self.layers = nn.ModuleList(model.layers[i] for i in own)
        self.embed = model.embed if own.start == 0 else None
        last = own.stop == len(model.layers)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, batch: ForwardBatch, x: Tensor | None = None) -> Tensor:
        """From ids (first stage) or hidden states `x` `[N, d_model]` to what comes next.

        Returns:
            Hidden states `[N, d_model]`; from the last stage logits `[B, vocab]`, float32.
        """
        if self.embed is not None:
            x = self.embed(batch.input_ids)
        assert x is not None, "only the first stage has no hidden states to begin with"
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, self.pool.k_cache(i), self.pool.v_cache(i))
        if self.norm is None or self.head is None:
            return x
        last = batch.last_tokens()
        logits: Tensor = self.head(self.norm(x[last])).float()
        return logits
