"""What one attention layer keeps in the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """Kind and cache geometry of one layer.

    Attributes:
        kind: "full" (keeps every token), "swa" (needs the last `window` tokens) or "compressed"
            (keeps an entry for every `ratio` tokens).
        kv_heads: heads of K and V.
        k_dim: head dimension of K.
        v_dim: head dimension of V; None for that of K.
        window: keys that a query sees, itself included (Hugging Face's `sliding_window`); for
            "swa" layers, and None for "full" ones.
        chunked: for "swa" layers: the context is cut into chunks of `window` tokens, and a query
            sees its chunk up to itself (Llama 4's `attention_chunk_size`).
        ratio: tokens per compressed entry (DeepSeek V4's `compress_rates`); for "compressed"
            layers, and for "swa" layers whose cache also holds entries, after the tokens' rows.
        shared: K and V are one tensor, of `k_dim`.

    Raises:
        ValueError: naming the field, what came and what was wanted.
    """

    kind: str
    kv_heads: int
    k_dim: int
    v_dim: int | None = None
    window: int | None = None
    chunked: bool = False
    ratio: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("full", "swa", "compressed"):
            raise ValueError(f"LayerSpec.kind is 'full', 'swa' or 'compressed'; got {self.kind!r}")
        if self.v_dim is None:
            object.__setattr__(self, "v_dim", self.k_dim)
        for name in ("kv_heads", "k_dim", "v_dim"):
            _positive(name, getattr(self, name))
        if self.shared and self.v_dim != self.k_dim:
            raise ValueError(
                f"LayerSpec.v_dim is k_dim, {self.k_dim}, where K and V are shared; "
                f"got {self.v_dim!r}"
            )
        if self.ratio is not None:
            _positive("ratio", self.ratio)
        if (self.kind, self.ratio is None) in (("compressed", True), ("full", False)):
            raise ValueError(
                f"LayerSpec.ratio is wanted for a layer of kind 'compressed', may be given for one "
                f"of kind 'swa', and is None for one of kind 'full'; got {self.ratio!r} for one of "
                f"kind {self.kind!r}"
            )
        if self.kind == "swa":
            if self.window is None:
                raise ValueError("LayerSpec.window is wanted for a layer of kind 'swa'; got None")
            _positive("window", self.window)
        elif self.window is not None:
            raise ValueError(
                f"LayerSpec.window is None for a layer of kind {self.kind!r}; got {self.window!r}"
            )
        elif self.chunked:
            raise ValueError(
                f"LayerSpec.chunked is False for a layer of kind {self.kind!r}; got True"
            )

    def first_seen(self, position: int) -> int:
        """The first position whose key a query at `position` sees."""
        if self.window is None:
            return 0
        if self.chunked:
            return position - position % self.window
        return max(0, position - self.window + 1)

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of one row of this layer, K and V together."""
        assert self.v_dim is not None
        return self.kv_heads * (self.k_dim + (0 if self.shared else self.v_dim)) * itemsize


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"LayerSpec.{name} is an int of at least 1; got {value!r}")
