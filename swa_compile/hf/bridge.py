"""A transformers model over a hybrid KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from swa_compile.hf.adaptation import Adaptation
from swa_compile.hf.attention import KEYWORD, PagedAttention
from swa_compile.hf.compiling import LEAST, compile_apart, compiles, mark_dynamic
from swa_compile.hf.compressed_caches import CompressedCaches
from swa_compile.hf.errors import UnsupportedModel, naming
from swa_compile.hf.families import is_tested
from swa_compile.hf.layers import AttentionLayer
from swa_compile.hf.probe import positions_known, refuse_other_paths
from swa_compile.hf.reading import read_layers
from swa_compile.hf.refusals import refuse
from swa_compile.hf.registration import register
from swa_compile.hf.rope import RopeBatch
from swa_compile.hf.self_check import compare_with_eager
from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec
from swa_compile.kv.host import on_device


class Bridge:
    """The layers of an unmodified causal language model, and its forward over a pool.

    Args:
        model: a causal language model of transformers, in eval mode. It is left as it is: only
            inside a forward of the bridge does its configuration name another attention, and do
            others stand in for some of its parts.

    Attributes:
        layers: its attention layers, in order.
        adaptation: what is done to it for the duration of a forward.
        specs: the caches that a pool for it has: layers that share a cache have one.
        positions: tokens that a request can have, where the model looks positions up in a table;
            None where it computes them.

    Raises:
        TypeError: `model` is no transformers model.
        UnsupportedModel: the model cannot run over a pool; the message names what is in the way.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        with naming(model):
            refuse(model)
            register()
            self.adaptation = Adaptation(model)
            self.layers: tuple[AttentionLayer, ...]
            self.specs: list[LayerSpec]
            self.layers, self.specs, self.dtype = read_layers(model, self.adaptation)
            self.positions: int | None = None  # the tested families compute theirs
            if not is_tested(model):
                config = model.config.get_text_config()
                longest = getattr(config, "max_position_embeddings", None) or 1024
                self.positions = positions_known(model, self.adaptation)
                longest = min(longest, self.positions or longest)
                refuse_other_paths(model, self.adaptation, longest - 1)
                compare_with_eager(self)

    def make_pool(self, **sizes: Any) -> HybridKVPool:
        """A pool for this model, on its device; `sizes` are those of `HybridKVPool`.

        No request of it can have more tokens than the model has positions.
        """
        context = sizes.get("max_context")
        context = sizes.get("max_tokens") if context is None else context
        if self.positions is not None and isinstance(context, int) and context > self.positions:
            sizes["max_context"] = self.positions
        return HybridKVPool(self.specs, dtype=self.dtype, device=self.model.device, **sizes)

    def batch(
        self,
        pool: HybridKVPool,
        pieces: Sequence[tuple[int, Sequence[int]]],
        lengths: Sequence[int],
        *,
        width: int | None = None,
    ) -> ForwardBatch:
        """A batch of `pool` for this model; arguments and errors are those of `pool.batch`.

        Args:
            lengths: tokens that each request is known to have by now, also those that go in later.
                RoPE by length goes by them; other models do not ask.
        """
        batch = pool.batch(pieces, width=width)
        if not self.adaptation.ropes:
            return batch
        of_tokens = [n for n, (_, ids) in zip(lengths, pieces, strict=True) for _ in ids]
        rope_lengths = on_device(of_tokens, torch.int64, batch.positions.device)
        return RopeBatch(**vars(batch), rope_lengths=rope_lengths)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, pool: HybridKVPool) -> Tensor:
        """Logits `[B, vocab]` of the last token of each request, without the compiler.

        Raises:
            TypeError: RoPE goes by length, and `batch` is not from `Bridge.batch`.
        """
        self.check(batch)
        with self.adaptation.attached():
            return last_logits(self, pool, batch)

    def check(self, batch: ForwardBatch) -> None:
        """Raise TypeError where `batch` does not say what this model asks for."""
        if self.adaptation.ropes and not isinstance(batch, RopeBatch):
            raise TypeError(
                "this model's RoPE goes by the length of each request, which a ForwardBatch does "
                "not tell: make batches with Bridge.batch"
            )


class Forward(nn.Module):
    """The forward of a bridged model over its pool: a batch to logits `[B, vocab]`.

    The one place in which the model is called. What captures graphs goes around it; as a module it
    tells what of model and pool a recording reads.

    Args:
        bridge: the model.
        pool: from `bridge.make_pool`.
        backend: of torch.compile; None or "eager" for no compilation.
        options: of the backend.

    Raises:
        UnsupportedModel: it is of no tested family, and Dynamo cannot trace it whole.
    """

    def __init__(
        self,
        bridge: Bridge,
        pool: HybridKVPool,
        backend: Any = "swa",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.bridge, self.model, self.pool = bridge, bridge.model, pool
        self.compiled = compiles(backend)
        self._call = compile_apart(last_logits, backend, options)
        if self.compiled and not is_tested(bridge.model):
            with naming(bridge.model):
                refuse_graph_breaks(bridge)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> Tensor:
        bridge = self.bridge
        bridge.check(batch)
        requests = len(batch.seq_lens)
        if self.compiled:
            batch = batch.pad(max(len(batch.input_ids), LEAST), max(requests, LEAST))
            mark_dynamic(batch)
        with bridge.adaptation.attached():
            logits: Tensor = self._call(bridge, self.pool, batch)
        return logits[:requests]


@torch.no_grad()
def refuse_graph_breaks(bridge: Bridge) -> None:
    """Trace one decode step; over a pool of its own.

    Raises:
        UnsupportedModel: with what Dynamo says.
    """
    pool = bridge.make_pool(max_tokens=LEAST, max_requests=LEAST)
    batch = bridge.batch(pool, [(pool.open(), [0]) for _ in range(LEAST)], [1] * LEAST)
    mark_dynamic(batch)
    traced = compile_apart(last_logits, lambda graph, inputs: graph.forward, None)
    try:
        with bridge.adaptation.attached():
            traced(bridge, pool, batch)
    except TorchDynamoException as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedModel(
            f"it cannot be compiled whole: {reason} (backend=None runs it without compiling)"
        ) from error


def last_logits(bridge: Bridge, pool: HybridKVPool, batch: ForwardBatch) -> Tensor:
    """Logits `[B, vocab]` of the last token of each request of `batch`, which is not empty."""
    return logits_of(bridge, pool, batch, batch.last_tokens())


def logits_of(bridge: Bridge, pool: HybridKVPool, batch: ForwardBatch, tokens: Tensor) -> Tensor:
    """Logits `[M, vocab]` of those of the N tokens of `batch` that `tokens`, int64 `[M]`, names."""
    adaptation, layers = bridge.adaptation, bridge.layers
    lengths = batch.rope_lengths if isinstance(batch, RopeBatch) else None
    keywords = adaptation.keywords(batch.positions, lengths)
    compressed = None
    if any(layer.compression is not None for layer in layers):
        compressed = keywords["past_key_values"] = CompressedCaches(batch, pool, layers)
    out = bridge.model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.positions.unsqueeze(0),  # never left out: the model would count from 0
        use_cache=False,
        logits_to_keep=tokens,
        **keywords,
        **{KEYWORD: PagedAttention(batch, pool, layers, compressed)},
    )
    adaptation.release()
    logits: Tensor = out.logits.squeeze(0)
    return logits
