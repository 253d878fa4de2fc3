"""What several ranks cost per forward, on paper: launches and bytes of each way to share a model.

Formulas, not measurements. Bytes on the wire are those of ring algorithms over `ranks` equal ranks
(Patarasuk and Yuan, 2009): an all-reduce of `b` bytes sends `2 * b * (ranks - 1) / ranks` from each
rank, an all-gather of `b` bytes per rank sends `b * (ranks - 1)`, a reduce-scatter that leaves `b`
bytes per rank as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swa_compile.kv import LayerSpec

AGREEMENT_BYTES = 3 * 8  # `agree_on_bucket`: three int64 of each rank
IDENTITY_BYTES = 32  # `verify_ranks`: a SHA-256 of each rank


@dataclass(frozen=True)
class Forward:
    """The sizes of one forward of the whole model.

    Attributes:
        layers: one spec per layer.
        tokens, requests: N and B; under data parallelism, of one rank, padding included.
        table_width: columns P of the page table.
        d_model: width of the hidden states.
        itemsize: bytes of an element of hidden states and caches.
    """

    layers: Sequence[LayerSpec]
    tokens: int
    requests: int
    table_width: int
    d_model: int
    itemsize: int = 2

    @property
    def hidden_bytes(self) -> int:
        """One tensor of hidden states, `[N, d_model]`."""
        return self.tokens * self.d_model * self.itemsize


@dataclass(frozen=True)
class Traffic:
    """What one rank does for the others in one forward.

    Attributes:
        launches: collectives, or sends.
        operand_bytes: of the tensors that this rank hands to them.
        sent_bytes: that leave this rank.
    """

    launches: int
    operand_bytes: int
    sent_bytes: int


def tensor_parallel(forward: Forward, ranks: int) -> Traffic:
    """Two all-reduces of the hidden states per layer."""
    launches = 2 * len(forward.layers)
    operands = launches * forward.hidden_bytes
    return Traffic(launches, operands, 2 * operands * (ranks - 1) // ranks)


def data_parallel_mlp(forward: Forward, ranks: int) -> Traffic:
    """An all-gather of this rank's hidden states and a reduce-scatter of all ranks', per layer."""
    layers, own = len(forward.layers), forward.hidden_bytes
    return Traffic(2 * layers, layers * own * (1 + ranks), 2 * layers * own * (ranks - 1))


def context_parallel(forward: Forward, ranks: int) -> Traffic:
    """An all-gather of K and one of V per layer; N is that of all ranks together."""
    own_tokens = -(-forward.tokens // ranks)
    operands = sum(layer.row_bytes(forward.itemsize) for layer in forward.layers) * own_tokens
    return Traffic(2 * len(forward.layers), operands, operands * (ranks - 1))


def pipeline_parallel(forward: Forward, stages: int) -> Traffic:
    """Hidden states to the next stage, once; nothing from the last."""
    launches = 1 if stages > 1 else 0
    return Traffic(launches, launches * forward.hidden_bytes, launches * forward.hidden_bytes)


def agreement(ranks: int) -> Traffic:
    """`agree_on_bucket`, once per forward and outside of the graph."""
    return Traffic(1, AGREEMENT_BYTES, AGREEMENT_BYTES * (ranks - 1))


def verification(ranks: int) -> Traffic:
    """`verify_ranks` where all agree, once per compilation."""
    return Traffic(1, IDENTITY_BYTES, IDENTITY_BYTES * (ranks - 1))


def translation_bytes(forward: Forward) -> int:
    """Read and written by the one node: the same on every rank and at every depth.

    Per location an int64 id, an int64 of the mapping and an int64 result; per entry of the page
    table an int32 id, an int64 of the mapping and an int32 result. 0 where no layer slides.
    """
    if not any(layer.kind == "swa" for layer in forward.layers):
        return 0
    return 24 * forward.tokens + 16 * forward.requests * forward.table_width


def cache_bytes(
    layers: Sequence[LayerSpec], full_tokens: int, swa_tokens: int, itemsize: int = 2
) -> int:
    """Of one rank's KV caches, sinks left out; `layers` are what that rank holds."""
    return sum(
        layer.row_bytes(itemsize) * (swa_tokens if layer.kind == "swa" else full_tokens)
        for layer in layers
    )
