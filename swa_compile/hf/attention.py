"""The attention function that transformers calls, and what it hands on to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swa_compile.hf.compressed_caches import CompressedCaches
from swa_compile.hf.layers import AttentionLayer
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

# The name of the attention implementation. No mask function is registered under it, so that the
# models make no masks.
NAME = "swa_compile"

# The keyword that carries an `Attend` through a model to its attention layers.
KEYWORD = "swa_attend"


class NotAttended(RuntimeError):
    """An attention layer was called by something else than the bridge."""


class Attend(Protocol):
    """What computes the attention of a forward."""

    def attend(self, call: Call) -> Tensor:
        """The attention of one layer: `[N, H_q, D_v]`."""


@dataclass
class Call:
    """One call of the attention function by a layer of a model.

    Attributes:
        module: the layer's attention module.
        query, key, value: `[1, H_q, N, D]`, `[1, H_kv, N, D]`, `[1, H_kv, N, D_v]`.
        mask: what the model made for a mask; None in a forward over the pool.
        scaling: factor on the scores; None for `D ** -0.5`.
        softcap, sinks: as `paged_attention` has them; None for none.
        window: the keyword `sliding_window`, which not every sliding layer passes.
        dropout: of the attention weights.
        rest: the other keywords.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    dropout: float
    rest: dict[str, Any]


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    swa_attend: Attend | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; `[1, N, H_q, D_v]`, and no attention weights.

    Raises:
        NotAttended: the model was not called by the bridge.
    """
    if swa_attend is None:
        raise NotAttended(
            f"the attention implementation '{NAME}' works on a KV pool: run the model through "
            "swa_compile.hf, or set another implementation"
        )
    call = Call(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scaling=scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
        dropout=dropout,
        rest=rest,
    )
    return swa_attend.attend(call).unsqueeze(0), None


@dataclass
class PagedAttention:
    """Attention of one forward over the pool: what the compiler sees, layer by layer.

    Each sliding layer translates for itself, where it needs it. The compiler does it once.
    """

    batch: ForwardBatch
    pool: HybridKVPool
    layers: tuple[AttentionLayer, ...]
    compressed: CompressedCaches | None = None

    def attend(self, call: Call) -> Tensor:
        """Store the new keys and values of a layer that owns a cache, and attend over its cache."""
        layer = self.layers[call.module.layer_idx]  # type: ignore[index]
        if layer.compression is not None:
            return self._compressed(call)
        batch, pool, size = self.batch, self.pool, self.pool.page_size
        loc, page_table, seq_lens = batch.out_cache_loc, batch.page_table, batch.seq_lens
        window = layer.spec.window
        if layer.spec.chunked:
            page_table, seq_lens = chunk_of(page_table, seq_lens, layer.spec.window, size)
            window = None
        if layer.spec.kind == "swa":
            mapping = batch.full_to_swa_index_mapping
            page_table = translate_page_table(mapping, page_table, size).to(torch.int32)

        k_cache, v_cache = pool.k_cache(layer.cache), pool.v_cache(layer.cache)
        if layer.stores:
            if layer.spec.kind == "swa":
                loc = translate_loc(batch.full_to_swa_index_mapping, loc)
            store_kv(k_cache, v_cache, _by_token(call.key), _by_token(call.value), loc)
        return paged_attention(
            _by_token(call.query),
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            batch.cu_seqlens_q,
            page_size=size,
            scale=call.scaling,
            window=window,
            softcap=call.softcap or 0.0,
            sinks=call.sinks,
        )

    def _compressed(self, call: Call) -> Tensor:
        assert self.compressed is not None
        caches = self.compressed.layers[call.module.layer_idx]  # type: ignore[index]
        assert caches is not None
        query, key = _by_token(call.query), _by_token(call.key)
        return caches.attend(query, key, call.scaling, call.sinks)


def chunk_of(
    page_table: Tensor, seq_lens: Tensor, chunk: int | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """Page table and length of each request's last chunk of `chunk` tokens.

    A query of a chunked layer sees its chunk up to itself. All new tokens of a request lie in one
    chunk (`HybridKVPool.batch` sees to it), so the chunk is a short request of its own.

    Args:
        page_table: `[B, P]`.
        seq_lens: `[B]`; 0 for padding.

    Returns:
        `[B, min(P, chunk // page_size)]` and `[B]`.
    """
    assert chunk is not None
    start = (seq_lens - 1).clamp_min(0) // chunk * chunk
    columns = torch.arange(min(page_table.shape[1], chunk // page_size), device=seq_lens.device)
    # Columns past the table are past the request: no query sees what stands there.
    columns = (start[:, None] // page_size + columns).clamp_max(page_table.shape[1] - 1)
    return page_table.gather(1, columns.long()), seq_lens - start


def _by_token(x: Tensor) -> Tensor:
    """`[1, H, N, D]` as `[N, H, D]`."""
    return x.squeeze(0).transpose(0, 1)
