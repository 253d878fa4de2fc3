"""The caches of a hybrid pool: buffers on the device, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn

from swa_compile.kv.layer_spec import LayerSpec


class KVCaches(nn.Module):
    """K and V of each layer, in buffers whose addresses never change.

    Args:
        layers: one spec per layer, in order.
        full_tokens, swa_tokens: capacity of each pool, the sink's page not counted.
        page_size: tokens per page.
        dtype, device: of the caches.

    Attributes:
        full_tokens, swa_tokens: as given; `swa_tokens` is 0 where no layer slides.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        full_tokens: int,
        swa_tokens: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.page_size = page_size
        self.full_tokens, self.swa_tokens = full_tokens, swa_tokens
        for i, spec in enumerate(self.layers):
            rows = self._rows(spec)
            for name, dim in (("k", spec.k_dim), ("v", spec.v_dim)):
                assert dim is not None
                if name == "v" and spec.shared:
                    continue
                cache = torch.zeros(rows, spec.kv_heads, dim, dtype=dtype, device=device)
                self.register_buffer(f"{name}_cache_{i}", cache, persistent=False)

    def k_cache(self, layer: int) -> Tensor:
        """K of `layer`: `[tokens + page_size, kv_heads, k_dim]`.

        Raises:
            IndexError: there is no such layer.
        """
        return self._cache("k", layer)

    def v_cache(self, layer: int) -> Tensor:
        """V of `layer`: `[tokens + page_size, kv_heads, v_dim]`; K itself where they are shared.

        Raises:
            IndexError: there is no such layer.
        """
        k = self._cache("k", layer)
        return k if self.layers[layer].shared else self._cache("v", layer)

    def _cache(self, name: str, layer: int) -> Tensor:
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"layer {layer} of a pool of {len(self.layers)} layers")
        cache: Tensor = getattr(self, f"{name}_cache_{layer}")
        return cache

    def nbytes(self) -> dict[str, int]:
        """Bytes of the caches: {"full": ..., "swa": ...}, and "compressed" where there are any."""
        total = {"full": 0, "swa": 0}
        for spec in self.layers:
            row = spec.row_bytes(self.k_cache(0).itemsize)
            entries = self.entries(spec)
            total[spec.kind] = total.get(spec.kind, 0) + (self._rows(spec) - entries) * row
            if entries:
                total["compressed"] = total.get("compressed", 0) + entries * row
        return total

    def full_only_nbytes(self) -> int:
        """Bytes that the caches would take if every layer kept every token."""
        rows = self.full_tokens + self.page_size
        return self._token_bytes() * rows

    def full_only_tokens(self) -> int:
        """Tokens that a pool of the same bytes would hold if every layer kept every token."""
        return max(0, sum(self.nbytes().values()) // self._token_bytes() - self.page_size)

    def _token_bytes(self) -> int:
        """Bytes of one token in all layers; a compressed entry is none of a token."""
        itemsize = self.k_cache(0).itemsize
        return sum(s.row_bytes(itemsize) for s in self.layers if s.kind != "compressed")

    def _rows(self, spec: LayerSpec) -> int:
        """Rows of the caches of a layer, those of the sink included."""
        tokens = {"full": self.full_tokens, "swa": self.swa_tokens}.get(spec.kind)
        return (0 if tokens is None else tokens + self.page_size) + self.entries(spec)

    def tokens_per_entry(self, ratio: int) -> int:
        """Full slots that share one entry slot: the entry of a token's group lies at its full
        slot divided by this. It is `ratio` where pages are whole groups; where they are not,
        entries have rows to spare, since the tokens of a group lie anywhere.
        """
        return gcd(ratio, self.page_size)

    def entries(self, spec: LayerSpec) -> int:
        """Rows of entries in the caches of a layer, those of the sink included: the last ones."""
        if spec.ratio is None:
            return 0
        return (self.full_tokens + self.page_size) // self.tokens_per_entry(spec.ratio)

    def first_entry(self, layer: int) -> int:
        """The row in the caches of `layer` at which its entries begin, with the sink's."""
        spec = self.layers[layer]
        return self._rows(spec) - self.entries(spec)
