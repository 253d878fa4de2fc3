"""Random weights, caches and batches. Never zeros: they compress, and they hide wrong rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from swa_compile.bench.configs import BenchConfig, Shape
from swa_compile.bench.model import PAGE_SIZE, Decoder
from swa_compile.kv import ForwardBatch

# Spread of the attention scores. With flat scores attention averages over the window, its result is
# close to zero, and a page table that names wrong rows would go unseen.
_PEAK = 2.0


@dataclass
class Setting:
    """What all variants of one measured step share: the model, and its static inputs.

    `load(seed)` puts another batch into the same tensors, as a scheduler does between replays.
    """

    config: BenchConfig
    shape: Shape
    decoder: Decoder
    x: Tensor  # [B, d_model]
    batch: ForwardBatch

    @classmethod
    def make(cls, config: BenchConfig, shape: Shape, device: torch.device) -> Setting:
        """Model, caches and the batch of seed 0 on `device`."""
        rows = {"full": config.full_tokens, "swa": config.swa_tokens}
        form = (config.kv_heads, config.head_dim)
        with torch.device(device):
            generator = torch.Generator(device).manual_seed(0)
            caches = []
            for kind in config.layers:
                k, v = (torch.empty(rows[kind], *form, dtype=config.dtype) for _ in "kv")
                caches.append((k.normal_(generator=generator), v.normal_(generator=generator)))
            decoder = Decoder(config, shape.window, caches, longest=shape.context)
        decoder = decoder.requires_grad_(False).eval()
        for name, parameter in decoder.named_parameters():
            _fill(name, parameter, config, generator)
        x, batch = _random_batch(config, shape, seed=0)
        return cls(config, shape, decoder, x.to(device), _to(batch, device))

    def load(self, seed: int) -> None:
        """Write the batch of `seed` into the tensors that captured graphs read."""
        x, batch = _random_batch(self.config, self.shape, seed)
        self.x.copy_(x)
        for field in fields(batch):
            getattr(self.batch, field.name).copy_(getattr(batch, field.name))

    def written(self) -> dict[str, Tensor]:
        """The rows that this batch writes, by the kind of layer; plain indexing, no operator."""
        full = self.batch.out_cache_loc
        return {"full": full, "swa": self.batch.full_to_swa_index_mapping[full]}


def _fill(name: str, parameter: Tensor, config: BenchConfig, generator: torch.Generator) -> None:
    """Weights that keep activations near unit size through all layers."""
    if parameter.dim() == 2:
        gain = 0.5 if ".out." in name or ".down." in name else 1.0
        parameter.normal_(std=gain * parameter.shape[1] ** -0.5, generator=generator)
        if ".qkv." in name and not config.qk_norm:
            q_and_k = (config.heads + config.kv_heads) * config.head_dim
            parameter[:q_and_k] *= _PEAK**0.5
    elif name.endswith("sinks"):
        parameter.normal_(generator=generator)
    else:
        parameter.uniform_(0.9, 1.1, generator=generator)
        if "q_norm" in name:
            parameter *= _PEAK


def _random_batch(config: BenchConfig, shape: Shape, seed: int) -> tuple[Tensor, ForwardBatch]:
    """A decode step on the CPU: one token per request, contexts that fill the window.

    About half of the ids have an SWA slot, each one of its own. Ids in the page tables are drawn
    with repetition, as where requests share prefixes; the written ones are distinct.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    batch, context = shape.batch, shape.context
    ids, rows = config.full_tokens, config.swa_tokens
    live = 1 + torch.randperm(ids - 1, generator=generator)[: rows - 1]
    mapping = torch.zeros(ids + PAGE_SIZE + 1, dtype=torch.int64)
    mapping[live] = 1 + torch.randperm(rows - 1, generator=generator)[: live.shape[0]]
    mapping[-1] = -1
    table = live[torch.randint(live.shape[0], (batch, context), generator=generator)]
    seq_lens = torch.randint(
        max(shape.window, 3 * context // 4), context + 1, (batch,), generator=generator
    )
    loc = live[torch.randperm(live.shape[0], generator=generator)[:batch]]
    requests = torch.arange(batch)
    table[requests, seq_lens - 1] = loc
    table[torch.arange(context) >= seq_lens[:, None]] = 0
    x = torch.randn(batch, config.d_model, generator=generator).to(config.dtype)
    return x, ForwardBatch(
        input_ids=torch.zeros(batch, dtype=torch.int64),  # the model has no embedding
        positions=seq_lens - 1,
        out_cache_loc=loc,
        page_table=table.to(torch.int32),
        seq_lens=seq_lens.to(torch.int32),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32),
        full_to_swa_index_mapping=mapping,
    )


def _to(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    return ForwardBatch(**{f.name: getattr(batch, f.name).to(device) for f in fields(batch)})
