"""The caches of DeepSeek V4's compressed layers, as the class asks for them.

transformers' class asks its cache for three things: tokens that make whole groups, the entries so
far, and the group before the first (`overlap`). `LayerCaches` answers over the pool, for all
requests of a forward at once:

- Keys and gates of single tokens wait in a sliding-window cache until their group is whole.
- The groups that a forward completes are handed to the class side by side; what it makes of them
  goes to the entries' rows, whose slots follow from the tokens' full slots.
- Which entries a query sees is decided here: all whole groups, or those that the layer's own
  indexer scores highest (`index_topk`).

Attention then reads rows of one cache through a table of its own for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swa_compile.hf.layers import AttentionLayer
from swa_compile.hf.token_index import live_tokens, request_of_tokens, slots_at
from swa_compile.kv import ForwardBatch, HybridKVPool
from swa_compile.ops import (
    paged_attention,
    store_kv,
    store_latent,
    translate_loc,
    translate_page_table,
)


class LayerCaches:
    """The caches of one compressed layer, as its class asks for them in one forward."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: HybridKVPool,
        layer: AttentionLayer,
    ) -> None:
        assert layer.compression is not None and layer.spec.window is not None
        self.batch, self.pool = batch, pool
        self.cache, self.window = layer.cache, layer.spec.window
        self.compression = layer.compression
        self.chosen: Tensor | None = None

    # ---- what the class calls ---------------------------------------------------------------

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the new tokens' keys and gates; those of the groups that are whole now.

        Args:
            kv, gate: `[1, N, F]`.

        Returns:
            Keys and gates `[1, G * ratio, F]`, and an int64 `[G]` that makes
            `arange(G) * ratio` the groups' first positions. With overlap, each group comes after
            the one before it, and every other of the G is there for the next one's sake.
        """
        batch, pool, ratio = self.batch, self.pool, self.compression.ratio
        source = self.compression.sources[name]
        mapping, size = batch.full_to_swa_index_mapping, pool.page_size
        keys, gates = pool.k_cache(source.tokens), pool.v_cache(source.tokens)
        loc = translate_loc(mapping, batch.out_cache_loc)
        store_kv(keys, gates, kv[0].unsqueeze(1), gate[0].unsqueeze(1), loc)

        requests, groups, _ = self._whole_groups()
        if self.compression.overlap:
            requests = requests[:, None].expand(-1, 2).flatten()
            groups = torch.stack((groups - 1, groups), 1).flatten()
        positions = groups[:, None] * ratio + torch.arange(ratio, device=groups.device)
        table = translate_page_table(mapping, batch.page_table, size)
        slots = slots_at(table, requests[:, None], positions, size).flatten()
        # The first group has none before it: no weight, whatever stands in the row.
        missing = (positions.flatten() < 0)[:, None]
        chunk = keys[slots].squeeze(1).masked_fill(missing, 0.0)
        weights = gates[slots].squeeze(1).masked_fill(missing, torch.finfo(gates.dtype).min)
        first = groups * ratio - torch.arange(groups.shape[0], device=groups.device) * ratio
        return chunk[None].to(kv.dtype), weights[None].to(gate.dtype), first

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[None, None]:
        """None: the group before each one is among the groups already."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the new entries `[1, G, D]`; no entries `[1, 0, D]`: they are read by slots."""
        source, pool = self.compression.sources[name], self.pool
        made = compressed[0, 1::2] if self.compression.overlap else compressed[0]
        requests, groups, whole = self._whole_groups()
        # What is no group goes to the sink.
        slots = torch.where(whole, self._entry_slots(requests, groups), 0)
        store_latent(
            pool.k_cache(source.entries),
            made.unsqueeze(1),
            slots + pool.first_entry(source.entries),
        )
        if name == "indexer":
            assert self.compression.scorer is not None
            self.compression.scorer.caches = self
        return compressed[:, :0]

    # ---- what the attention function and the scorer call ------------------------------------

    def entries_of_tokens(self) -> Tensor:
        """The indexer's entries of each token's request, `[N, T, D]`; T is that of the table."""
        source, pool = self.compression.indexer, self.pool
        assert source is not None
        requests = request_of_tokens(self.batch)
        groups = torch.arange(self._most_entries(), device=requests.device)
        slots = self._entry_slots(requests[:, None], groups) + pool.first_entry(source.entries)
        return pool.k_cache(source.entries)[slots].squeeze(2)

    def choose(self, scores: Tensor) -> None:
        """Keep the entries of the highest scores `[N, T]` among the whole groups of each query."""
        groups = torch.arange(scores.shape[1], device=scores.device)
        whole = (self.batch.positions + 1) // self.compression.ratio
        # Also where a row is nobody's and holds NaN.
        scores = scores.masked_fill(groups >= whole[:, None], -torch.inf)
        most = min(self.compression.chosen, scores.shape[1])
        self.chosen = scores.topk(most, dim=-1).indices

    def attend(
        self, query: Tensor, key: Tensor, scale: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Store the new keys `[N, 1, D]`; attention `[N, H, D]` over window and entries."""
        batch, pool = self.batch, self.pool
        joint = pool.k_cache(self.cache)
        mapping = batch.full_to_swa_index_mapping
        store_latent(joint, key, translate_loc(mapping, batch.out_cache_loc))
        table, lengths = self._table()
        tokens = torch.arange(
            lengths.shape[0] + 1, device=lengths.device, dtype=batch.cu_seqlens_q.dtype
        )
        return paged_attention(
            query, joint, joint, table, lengths, tokens, page_size=1, scale=scale, sinks=sinks
        )

    # ---- indices ----------------------------------------------------------------------------

    def _most_entries(self) -> int:
        return max(1, self.batch.page_table.shape[1] * self.pool.page_size // self._ratio)

    @property
    def _ratio(self) -> int:
        return self.compression.ratio

    def _whole_groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """The groups that this forward completes, `[G]` each: request, number, and whether it is.

        G is a bound for the sizes of the batch, the same for all forwards of such sizes.
        """
        batch = self.batch
        offsets = batch.cu_seqlens_q.long()
        new, ends = offsets[1:] - offsets[:-1], batch.seq_lens.long()
        before = (ends - new) // self._ratio
        counts = ends // self._ratio - before
        sums = counts.cumsum(0)
        bound = batch.positions.shape[0] // self._ratio + ends.shape[0]
        places = torch.arange(bound, device=ends.device)
        requests = torch.searchsorted(sums, places, right=True).clamp_max(ends.shape[0] - 1)
        groups = before[requests] + places - (sums - counts)[requests]
        whole = places < sums[-1]
        return requests, torch.where(whole, groups, 0), whole

    def _entry_slots(self, requests: Tensor, groups: Tensor) -> Tensor:
        """Slots among the entries, by the full slot of each group's last token."""
        size = self.pool.page_size
        last = groups * self._ratio + self._ratio - 1
        full = slots_at(self.batch.page_table, requests, last, size)
        return full // self.pool.tokens_per_entry(self._ratio)

    def _table(self) -> tuple[Tensor, Tensor]:
        """Rows of the joint cache that each token sees, int32 `[N, M]`, and how many, `[N]`.

        Entries come first, then the window.
        """
        batch, size = self.batch, self.pool.page_size
        requests, positions = request_of_tokens(batch)[:, None], batch.positions[:, None]
        entries = (positions + 1) // self._ratio
        groups = torch.arange(self._most_entries(), device=positions.device)[None]
        if self.chosen is not None:
            groups = self.chosen
            entries = entries.clamp_max(groups.shape[1])
        slots = self._entry_slots(requests, groups) + self.pool.first_entry(self.cache)
        near = (positions + 1).clamp_max(self.window)
        columns = torch.arange(groups.shape[1] + self.window, device=positions.device)
        table = translate_page_table(batch.full_to_swa_index_mapping, batch.page_table, size)
        tokens = slots_at(table, requests, positions + 1 - near + columns - entries, size)
        # Past the entries that there are, any: the window's rows stand there.
        padded = nn.functional.pad(slots.expand(positions.shape[0], -1), (0, self.window))
        rows = torch.where(columns < entries, padded, tokens)
        lengths = torch.where(live_tokens(batch), (entries + near).squeeze(1), 0)
        return rows.to(torch.int32), lengths.to(torch.int32)


class CompressedCaches:
    """What a model with compressed layers has for its cache in one forward.

    Attributes:
        layers: a `LayerCaches` for each compressed layer, None for others.
    """

    def __init__(
        self, batch: ForwardBatch, pool: HybridKVPool, layers: tuple[AttentionLayer, ...]
    ) -> None:
        self.layers = [
            None if layer.compression is None else LayerCaches(batch, pool, layer)
            for layer in layers
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they came: the attention function stores them."""
        return key_states, value_states
