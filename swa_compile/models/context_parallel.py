"""The reference model with the tokens of each request cut over ranks: context parallelism.

Every rank keeps the K/V of all tokens and attends with the queries of its own. K and V are gathered
in each layer and stored at the *global* locations; the page table that queries read through is the
*local* one, since a rank's parts of a request end at different places. Both are translated, in one
node, as two values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from swa_compile.kv import ForwardBatch
from swa_compile.models.hybrid import Attention, HybridTransformer
from swa_compile.models.tensor_parallel import layers_of
from swa_compile.ops import store_kv, translate_loc, translate_page_table


@dataclass
class ContextShard:
    """One rank's part of a batch, made by `split_context`. n is the same on every rank."""

    batch: ForwardBatch  # n own tokens (padding last), 2B parts; its out_cache_loc is local
    out_cache_loc: Tensor  # int64 [ranks * n]: full slots of all ranks' tokens, in gathered order


pytree.register_dataclass(ContextShard)


def split_context(
    batch: ForwardBatch, offsets: Sequence[int], rank: int, ranks: int
) -> ContextShard:
    """The part of `batch` that `rank` of `ranks` computes.

    Each request's new tokens are cut into `2 * ranks` parts, of which a rank gets one from the
    front and one from the back, so that causal attention costs every rank about the same. The two
    parts are rows `2 * b` and `2 * b + 1` of the shard; the last token of every request is that of
    row `2 * b + 1` on rank 0.

    Args:
        batch: the same on every rank, without padding.
        offsets: `batch.cu_seqlens_q` as the host knows it; nothing is read from the device.
    """
    parts = [_own_parts(offsets, r, ranks) for r in range(ranks)]
    tokens = [[t for part in own for t in part] for own in parts]
    n = max(map(len, tokens))
    device = batch.out_cache_loc.device

    def take(field: Tensor, places: list[int]) -> Tensor:
        """`field` at `places`, then 0 up to n: padding writes the sink."""
        return F.pad(field[torch.tensor(places, device=device).long()], (0, n - len(places)))

    # Row 2b ends where its last query stands: keys behind it are not for that row.
    ends, starts = [], [0]
    for b, (first, last) in enumerate(itertools.pairwise(offsets)):
        for part in parts[rank][2 * b : 2 * b + 2]:
            ends.append((last - first) - (part.stop - first))
            starts.append(starts[-1] + len(part))
    back = torch.tensor(ends, dtype=torch.int32, device=device)
    local = ForwardBatch(
        input_ids=take(batch.input_ids, tokens[rank]),
        positions=take(batch.positions, tokens[rank]),
        out_cache_loc=take(batch.out_cache_loc, tokens[rank]),
        page_table=batch.page_table.repeat_interleave(2, 0),
        seq_lens=batch.seq_lens.repeat_interleave(2) - back,
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        full_to_swa_index_mapping=batch.full_to_swa_index_mapping,
    )
    return ContextShard(local, torch.cat([take(batch.out_cache_loc, own) for own in tokens]))


def _own_parts(offsets: Sequence[int], rank: int, ranks: int) -> list[range]:
    """The tokens of the batch that `rank` has, two ranges for each request."""
    parts = []
    for first, last in itertools.pairwise(offsets):
        for i in (rank, 2 * ranks - 1 - rank):
            bounds = [first + (last - first) * j // (2 * ranks) for j in (i, i + 1)]
            parts.append(range(*bounds))
    return parts


class ContextTransformer(nn.Module):
    """`model` over a `ContextShard`: `forward(shard)` gives logits `[2B, vocab]`, float32.

    Those of row `2 * b + 1` on rank 0 are the next-token logits of request b.
    """

    def __init__(self, model: HybridTransformer, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model = model
        self.group = group.group_name

    def forward(self, shard: ContextShard) -> Tensor:
        model, batch = self.model, shard.batch
        x = model.embed(batch.input_ids)
        for i, layer in enumerate(layers_of(model)):
            caches = model.pool.k_cache(i), model.pool.v_cache(i)
            h = layer.attention_norm(x)
            x = x + self.attend(layer.attention, h, shard, *caches)
            x = x + layer.down(F.gelu(layer.up(layer.mlp_norm(x))))
        last = batch.last_tokens()
        logits: Tensor = model.head(model.norm(x[last])).float()
        return logits

    def attend(
        self, layer: Attention, x: Tensor, shard: ContextShard, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        batch = shard.batch
        q, k, v = layer.project(x, batch.positions)
        k = funcol.all_gather_tensor(k.contiguous(), 0, self.group)
        v = funcol.all_gather_tensor(v.contiguous(), 0, self.group)

        loc, page_table = shard.out_cache_loc, batch.page_table
        if layer.swa:
            mapping = batch.full_to_swa_index_mapping
            loc = translate_loc(mapping, loc)
            page_table = translate_page_table(mapping, page_table, layer.page_size)
            page_table = page_table.to(torch.int32)

        store_kv(k_cache, v_cache, k, v, loc)
        return layer.attend(q, k_cache, v_cache, page_table, batch)
