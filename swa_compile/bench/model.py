"""The decoder that all variants share: the same layers and weights, three ways to the indices.

It has no embedding and no output head, which are the same in every variant. cos and sin of RoPE are
read from a table once per forward and handed down, as in gpt-fast, so that eager code is not made
slower than its authors write it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swa_compile.bench.configs import BenchConfig
from swa_compile.kv import ForwardBatch
from swa_compile.ops import paged_attention, store_kv, translate_loc, translate_page_table

PAGE_SIZE = 1

# What an SWA layer calls for the slots that it writes and for the table of those that it reads.
Indices = Callable[[], tuple[Tensor, Tensor]]
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def natural(batch: ForwardBatch) -> Indices:
    """Each layer translates by our operators, where it needs it."""

    def indices() -> tuple[Tensor, Tensor]:
        mapping = batch.full_to_swa_index_mapping
        table = translate_page_table(mapping, batch.page_table, PAGE_SIZE)
        return translate_loc(mapping, batch.out_cache_loc), table.to(torch.int32)

    return indices


def aten(batch: ForwardBatch) -> Indices:
    """Each layer translates by plain indexing."""

    def indices() -> tuple[Tensor, Tensor]:
        mapping = batch.full_to_swa_index_mapping
        return mapping[batch.out_cache_loc], mapping[batch.page_table].to(torch.int32)

    return indices


def by_hand(batch: ForwardBatch) -> Indices:
    """Translated once at the start of the forward, and handed down."""
    once = natural(batch)()
    return lambda: once


def store_aten(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, loc: Tensor) -> None:
    """The store as plain indexed writes, which Inductor fuses."""
    k_cache.index_put_((loc,), k)
    v_cache.index_put_((loc,), v)


class Decoder(nn.Module):
    """`forward(x, batch)` gives the last hidden states `[B, d_model]` of a decode step.

    Args:
        config: shape of the layers.
        window: keys that an "swa" layer sees.
        caches: K and V of each layer, `[rows, kv_heads, head_dim]`, written in place.
        longest: positions for which RoPE's table has rows.
    """

    def __init__(
        self,
        config: BenchConfig,
        window: int,
        caches: list[tuple[Tensor, Tensor]],
        longest: int,
    ) -> None:
        super().__init__()
        self.kinds = config.layers
        self.layers = nn.ModuleList(
            Layer(config, window if kind == "swa" else None) for kind in config.layers
        )
        self.norm = nn.RMSNorm(config.d_model, dtype=config.dtype)
        for i, (k_cache, v_cache) in enumerate(caches):
            self.register_buffer(f"k_cache_{i}", k_cache)
            self.register_buffer(f"v_cache_{i}", v_cache)
        self.thetas = {"full": config.rope_theta, "swa": config.swa_rope_theta}
        for kind in self.thetas:
            self.register_buffer(
                f"rope_{kind}", rope_table(longest, config.head_dim, self.thetas[kind])
            )

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of `layer`."""
        return getattr(self, f"k_cache_{layer}"), getattr(self, f"v_cache_{layer}")

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        way: Callable[[ForwardBatch], Indices] = natural,
        store: Store = store_kv,
    ) -> Tensor:
        swa_indices = way(batch)
        angles = {kind: getattr(self, f"rope_{kind}")[batch.positions] for kind in self.thetas}
        for i, layer in enumerate(self.layers):
            kind = self.kinds[i]
            if kind == "swa":
                loc, table = swa_indices()
            else:
                loc, table = batch.out_cache_loc, batch.page_table
            x = layer(x, angles[kind], loc, table, batch, *self.caches(i), store)
        out: Tensor = self.norm(x)
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: BenchConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.gated = config.mlp != "gelu"
        self.act = F.silu if config.mlp == "swiglu" else F.gelu
        d_model, dtype = config.d_model, config.dtype
        self.attention_norm = nn.RMSNorm(d_model, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(d_model, dtype=dtype)
        self.qkv = _linear(d_model, config.qkv_width, dtype)
        self.heads = Heads(config)
        self.out = _linear(config.heads * config.head_dim, d_model, dtype)
        self.up = _linear(d_model, config.mlp_width * (1 + self.gated), dtype)
        self.down = _linear(config.mlp_width, d_model, dtype)
        sinks = torch.empty(config.heads, dtype=dtype)
        self.sinks = nn.Parameter(sinks) if config.sinks else None
        self.post_attention_norm = _norm(d_model, dtype, config.post_norms)
        self.post_mlp_norm = _norm(d_model, dtype, config.post_norms)

    def forward(
        self,
        x: Tensor,
        angles: Tensor,
        loc: Tensor,
        table: Tensor,
        batch: ForwardBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        store: Store,
    ) -> Tensor:
        q, k, v = self.heads(self.qkv(self.attention_norm(x)), angles)
        store(k_cache, v_cache, k, v, loc)
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            page_size=PAGE_SIZE,
            window=self.window,
            sinks=self.sinks,
        )
        x = x + self.post_attention_norm(self.out(attended.flatten(1)))
        hidden = self.up(self.mlp_norm(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.act(gate) * hidden
        else:
            hidden = self.act(hidden)
        out: Tensor = x + self.post_mlp_norm(self.down(hidden))
        return out


class Heads(nn.Module):
    """The joint projection `[N, qkv_width]` cut into q, k, v `[N, heads, head_dim]`.

    q and k are normalized, where the model does that, and rotated.
    """

    def __init__(self, config: BenchConfig) -> None:
        super().__init__()
        self.counts = (config.heads, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_dim
        self.q_norm = _norm(config.head_dim, config.dtype, config.qk_norm)
        self.k_norm = _norm(config.head_dim, config.dtype, config.qk_norm)

    def forward(self, qkv: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [count * self.head_dim for count in self.counts]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in qkv.split(sizes, dim=-1))
        return rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles), v


def _linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


def _norm(width: int, dtype: torch.dtype, wanted: bool) -> nn.Module:
    return nn.RMSNorm(width, dtype=dtype) if wanted else nn.Identity()


def rope_table(positions: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin beside each other, float32 `[positions, head_dim]` (Su et al., 2021)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-exponent
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """`x` `[N, H, D]` rotated by `angles` `[N, D]`, halves against each other, in float32."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
