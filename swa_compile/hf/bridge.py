"""A transformers model over a hybrid KV pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_compile.hf.attention import KEYWORD, PagedAttention
from swa_compile.hf.compiling import LEAST, compile_apart, compiles, mark_dynamic
from swa_compile.hf.errors import naming
from swa_compile.hf.families import is_tested
from swa_compile.hf.layers import AttentionLayer
from swa_compile.hf.probe import refuse_other_paths
from swa_compile.hf.reading import read_layers
from swa_compile.hf.refusals import refuse
from swa_compile.hf.registration import attached, configurations, register
from swa_compile.hf.self_check import compare_with_eager
from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec


class Bridge:
    """The layers of an unmodified causal language model, and its forward over a pool.

    Args:
        model: a causal language model of transformers, in eval mode. It is left as it is: only
            inside a forward of the bridge does its configuration name another attention.

    Attributes:
        layers: its attention layers, in order.
        configs: the configurations that name its attention.
        specs: the caches that a pool for it has: layers that share a cache have one.

    Raises:
        TypeError: `model` is no transformers model.
        UnsupportedModel: the model cannot run over a pool; the message names what is in the way.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        with naming(model):
            refuse(model)
            register()
            self.configs = configurations(model)
            self.layers: tuple[AttentionLayer, ...]
            self.layers, self.dtype = read_layers(model)
            self.specs: list[LayerSpec] = [layer.spec for layer in self.layers if layer.stores]
            if not is_tested(model):
                config = model.config.get_text_config()
                longest = getattr(config, "max_position_embeddings", None) or 1024
                refuse_other_paths(model, longest - 1)
                compare_with_eager(self)

    def make_pool(self, **sizes: Any) -> HybridKVPool:
        """A pool for this model, on its device; `sizes` are those of `HybridKVPool`."""
        return HybridKVPool(self.specs, dtype=self.dtype, device=self.model.device, **sizes)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, pool: HybridKVPool) -> Tensor:
        """Logits `[B, vocab]` of the last token of each request, without the compiler."""
        with attached(self.configs):
            return last_logits(self.model, self.layers, pool, batch)


class Forward:
    """The forward of a bridged model over its pool: a batch to logits `[B, vocab]`.

    The one place in which the model is called. What captures graphs goes around it.

    Args:
        bridge: the model.
        pool: from `bridge.make_pool`.
        backend: of torch.compile; None or "eager" for no compilation.
        options: of the backend.
    """

    def __init__(
        self,
        bridge: Bridge,
        pool: HybridKVPool,
        backend: Any = "swa",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.bridge, self.pool = bridge, pool
        self.compiled = compiles(backend)
        self._call = compile_apart(last_logits, backend, options)

    @torch.no_grad()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        bridge = self.bridge
        requests = len(batch.seq_lens)
        if self.compiled:
            batch = batch.pad(max(len(batch.input_ids), LEAST), max(requests, LEAST))
            mark_dynamic(batch)
        with attached(bridge.configs):
            logits: Tensor = self._call(bridge.model, bridge.layers, self.pool, batch)
        return logits[:requests]


def last_logits(
    model: Any, layers: tuple[AttentionLayer, ...], pool: HybridKVPool, batch: ForwardBatch
) -> Tensor:
    """Logits `[B, vocab]` of the last token of each request of `batch`, which is not empty."""
    return logits_of(model, layers, pool, batch, batch.last_tokens())


def logits_of(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    pool: HybridKVPool,
    batch: ForwardBatch,
    tokens: Tensor,
) -> Tensor:
    """Logits `[M, vocab]` of those of the N tokens of `batch` that `tokens`, int64 `[M]`, names."""
    out = model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.positions.unsqueeze(0),  # never left out: the model would count from 0
        use_cache=False,
        logits_to_keep=tokens,
        **{KEYWORD: PagedAttention(batch, pool, layers)},
    )
    logits: Tensor = out.logits.squeeze(0)
    return logits
