"""A small transformer that mixes full and sliding-window attention.

It is the example that the README shows: nothing is hoisted by hand. Every sliding-window layer
translates its write locations and its page table itself, where it needs them, as if that cost
nothing. The compiler makes it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swa_compile.kv import ForwardBatch, HybridKVPool, LayerSpec
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table


@dataclass(frozen=True)
class HybridConfig:
    """Shape and options of a `HybridTransformer`.

    Attributes:
        layers: kind of each layer, "full" or "swa".
        window: keys that a query of an "swa" layer sees, itself included.
        kv_heads: heads of K and V; fewer than `heads` is grouped-query attention.
        qk_norm: RMS-normalize each head of q and k (Gemma 3, Qwen 3).
        softcap: tanh cap on attention scores (Gemma 2); 0 for none.
        sinks: a learned attention-sink logit per head (gpt-oss).
        rope_theta, swa_rope_theta: RoPE base of full and of sliding-window layers (Gemma 3).
    """

    layers: tuple[str, ...] = ("swa", "full") * 6
    vocab_size: int = 256
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 64
    mlp_ratio: int = 4
    qk_norm: bool = True
    softcap: float = 0.0
    sinks: bool = True
    rope_theta: float = 1_000_000.0
    swa_rope_theta: float = 10_000.0

    def layer_specs(self) -> list[LayerSpec]:
        """What the KV pool has to hold, layer by layer."""
        return [
            LayerSpec(
                kind=kind,
                kv_heads=self.kv_heads,
                k_dim=self.head_dim,
                window=self.window if kind == "swa" else None,
            )
            for kind in self.layers
        ]


class HybridTransformer(nn.Module):
    """A decoder over a `HybridKVPool`: `forward(batch)` gives the next-token logits.

    Args:
        config: shape and options.
        pool: made from `config.layer_specs()`; its caches are written in place.
    """

    def __init__(self, config: HybridConfig, pool: HybridKVPool) -> None:
        super().__init__()
        self.pool = pool
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(
            Layer(config, spec, pool.page_size) for spec in config.layer_specs()
        )
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits `[B, vocab]`, float32, of the last token of each request of `batch`."""
        x = self.embed(batch.input_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, self.pool.k_cache(i), self.pool.v_cache(i))
        return self.head(self.norm(x[batch.last_tokens()])).float()


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: HybridConfig, spec: LayerSpec, page_size: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config, spec, page_size)
        self.mlp_norm = nn.RMSNorm(config.d_model)
        hidden = config.mlp_ratio * config.d_model
        self.up: nn.Module = nn.Linear(config.d_model, hidden, bias=False)
        self.down: nn.Module = nn.Linear(hidden, config.d_model, bias=False)

    def forward(self, x: Tensor, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, k_cache, v_cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Attention(nn.Module):
    """Self-attention of one layer over its cache in the pool."""

    def __init__(self, config: HybridConfig, spec: LayerSpec, page_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.swa = spec.kind == "swa"
        self.window = spec.window
        self.page_size = page_size
        self.softcap = config.softcap
        self.theta = config.swa_rope_theta if self.swa else config.rope_theta
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.d_model, width, bias=False)
        self.out: nn.Module = nn.Linear(self.heads * self.head_dim, config.d_model, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.randn(self.heads)) if config.sinks else None

    def forward(self, x: Tensor, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q, k, v = self.project(x, batch.positions)
        loc, page_table = batch.out_cache_loc, batch.page_table
        if self.swa:
            mapping = batch.full_to_swa_index_mapping
            loc = translate_loc(mapping, loc)
            page_table = translate_page_table(mapping, page_table, self.page_size).to(torch.int32)

        store_kv(k_cache, v_cache, k, v, loc)
        return self.attend(q, k_cache, v_cache, page_table, batch)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of `x` `[N, d_model]`, each `[N, heads, head_dim]`."""
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x).split(sizes, dim=-1))
        q = rope(self.q_norm(q), positions, self.theta)
        k = rope(self.k_norm(k), positions, self.theta)
        return q, k, v

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """`[N, d_model]`: the queries over the cached keys that `page_table` names."""
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            page_size=self.page_size,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        out: Tensor = self.out(attended.flatten(1))
        return out


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of `x` `[N, H, D]` at `positions` `[N]` (Su et al., 2021).

    Halves are rotated against each other (the layout of GPT-NeoX), in float32.
    """
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions[:, None].float() * theta**-exponent
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
