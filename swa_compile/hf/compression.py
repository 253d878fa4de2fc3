"""DeepSeek V4's compressed layers: entries of several tokens beside a window of single ones.

A compressed layer attends to the last `sliding_window` tokens and to *entries*, each made of the
keys and gates of `ratio` tokens by the layer's compressor. An indexer, where there is one, makes
smaller entries of its own, by whose scores each query chooses. What each of them keeps in the pool
is read off the modules here; `compressed_caches` is what happens in a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.paged_scorer import PagedScorer, scorer_of
from swa_compile.hf.stand_ins import StandIn
from swa_compile.kv import LayerSpec

KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")


@dataclass(frozen=True)
class Source:
    """What one compressor of a layer keeps in the pool.

    Attributes:
        tokens: its cache of keys (as K) and gates (as V) of single tokens.
        entries: the cache that its entries are in.
    """

    tokens: int
    entries: int


@dataclass(frozen=True)
class Compression:
    """How a layer compresses.

    Attributes:
        ratio: tokens per group.
        overlap: an entry is made of its group and the one before.
        compressor: of the entries that are attended to.
        indexer: of those that choose among them; None where all are attended to.
        chosen: entries that a query sees at most; 0 without an indexer.
        scorer: what stands in for the indexer's scorer.
    """

    ratio: int
    overlap: bool
    compressor: Source
    indexer: Source | None
    chosen: int
    scorer: PagedScorer | None

    @property
    def sources(self) -> dict[str, Source]:
        """By the name under which the class asks for them."""
        found = {"compressor": self.compressor}
        return found if self.indexer is None else {**found, "indexer": self.indexer}


def read_compression(
    index: int,
    module: nn.Module,
    cache: int,
    spec: LayerSpec,
    first_free: int,
    stand_ins: Sequence[StandIn],
) -> tuple[Compression, LayerSpec, list[LayerSpec]] | None:
    """How the attention layer `module` compresses; None where it does not.

    Args:
        index: of the layer. cache: its own. spec: of that.
        first_free: number of the first cache that no layer has.
        stand_ins: of the model, the scorers' among them.

    Returns:
        How it does, the spec of its own cache, and those of further caches, from `first_free` on.

    Raises:
        UnsupportedModel: it does so in a way that is not known.
    """
    compressor: Any = getattr(module, "compressor", None)
    if compressor is None:
        return None
    indexer = getattr(compressor, "indexer", None)
    wanted = ("compress_rate", "head_dim", "kv_proj", "gate_proj")
    parts = [part for part in (compressor, indexer) if part is not None]
    if any(not hasattr(part, name) for part in parts for name in wanted) or (
        indexer is not None and not all(hasattr(indexer, n) for n in ("scorer", "index_topk"))
    ):
        raise UnsupportedModel(
            f"layer {index} ({type(module).__name__}) compresses keys in a way that is not known "
            f"({type(compressor).__name__})"
        )
    ratio, width = compressor.compress_rate, compressor.kv_proj.out_features
    overlap = width == 2 * compressor.head_dim
    if spec.kind != "swa" or spec.k_dim != compressor.head_dim or spec.kv_heads != 1:
        raise UnsupportedModel(
            f"layer {index} ({type(module).__name__}) has entries of {compressor.head_dim} "
            f"dimensions beside keys of another form: {spec}"
        )
    window = ratio * (1 + overlap)
    own = LayerSpec("swa", 1, spec.k_dim, window=spec.window, ratio=ratio, shared=True)
    more = [LayerSpec("swa", 1, width, width, window)]
    source = Source(first_free, cache)
    other: Source | None = None
    chosen, scorer = 0, None
    if indexer is not None:
        width = indexer.kv_proj.out_features
        more.append(LayerSpec("swa", 1, width, width, window))
        more.append(LayerSpec("compressed", 1, indexer.head_dim, ratio=ratio, shared=True))
        other, chosen = Source(first_free + 1, first_free + 2), indexer.index_topk
        scorer = scorer_of(indexer, stand_ins)
    return Compression(ratio, overlap, source, other, chosen, scorer), own, more
