"""An indexer's scorer over the entries of each token's own request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from swa_compile.hf.stand_ins import StandIn

if TYPE_CHECKING:
    from swa_compile.hf.compressed_caches import LayerCaches


class PagedScorer(nn.Module):
    """Stands in for an indexer's scorer, and chooses entries by its scores.

    Attributes:
        caches: of the layer in this forward; set by `LayerCaches` when the indexer asks it.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.caches: LayerCaches | None = None

    def forward(self, q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
        """No scores, `[1, N, 0]`: the choice is kept with the layer's caches.

        Without caches (a model that is only looked at) the scores are the original's.

        Args:
            q: `[1, N, H, D]`. hidden_states: `[1, N, hidden]`.
        """
        caches, self.caches = self.caches, None
        if caches is None:
            scores: Tensor = self.original(q, compressed_kv, hidden_states)
            return scores
        keys = caches.entries_of_tokens()
        # Each token is a batch of its own, with the entries of its request.
        scores = self.original(q.transpose(0, 1), keys, hidden_states.transpose(0, 1))
        caches.choose(scores.squeeze(1))
        return q.new_empty(1, q.shape[1], 0)


def paged_scorers(model: nn.Module) -> list[StandIn]:
    """What stands in for the scorers of indexers; none in most models."""
    found = []
    for module in model.modules():
        scorer = getattr(module, "scorer", None)
        if hasattr(module, "index_topk") and isinstance(scorer, nn.Module):
            found.append(StandIn(module, "scorer", PagedScorer(scorer)))
    return found


def scorer_of(indexer: nn.Module, stand_ins: Sequence[StandIn]) -> PagedScorer:
    """What stands in for the scorer of `indexer`, which has one."""
    for one in stand_ins:
        if one.parent is indexer and isinstance(one.module, PagedScorer):
            return one.module
    raise AssertionError("an indexer's scorer has no stand-in")
