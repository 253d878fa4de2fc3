"""What the bridge knows of one attention layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

from swa_compile.hf.compression import Compression
from swa_compile.kv import LayerSpec


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer and its cache.

    Attributes:
        spec: kind and geometry of the cache that the layer reads.
        cache: its number in the pool.
        stores: it writes that cache; False where it reads the cache of an earlier layer (Gemma 3n).
        heads: query heads.
        sinks: it has a learned attention-sink logit per head.
        compression: of a layer that attends to compressed entries beside its window.
    """

    spec: LayerSpec
    cache: int
    stores: bool
    heads: int
    sinks: bool
    compression: Compression | None = None
