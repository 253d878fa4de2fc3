"""The models that are measured: shapes, not trained weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BenchConfig:
    """Shape of a decoder, and of the KV pools that it decodes from.

    Attributes:
        name: what `--config` calls it.
        about: where the shape comes from, and what is left out.
        layers: kind of each layer, "full" or "swa".
        mlp: "gelu" (up, down) or "swiglu", "geglu" (gate and up in one product, down).
        mlp_width: columns of the up projection.
        qk_norm: RMS-normalize each head of q and k.
        sinks: an attention-sink logit per head.
        post_norms: RMSNorm behind attention and MLP, too (Gemma).
        window: keys that an "swa" layer sees, itself included, unless a run asks for another.
        context: tokens of the longest request unless a run asks for another; None for `window`.
        full_tokens: ids that the mapping knows, 0 (the sink) included.
        swa_tokens: rows of the SWA pool, the sink included.
    """

    name: str
    about: str
    layers: tuple[str, ...]
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: str
    mlp_width: int
    window: int
    context: int | None
    full_tokens: int
    swa_tokens: int
    qk_norm: bool = True
    sinks: bool = False
    post_norms: bool = False
    rope_theta: float = 1_000_000.0
    swa_rope_theta: float = 10_000.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def qkv_width(self) -> int:
        """Columns of the joint projection to q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


_REF24 = BenchConfig(
    name="ref24",
    about="24 sliding-window layers; qk-norm, RoPE, MLP of 4 x d_model with GELU",
    layers=("swa",) * 24,
    d_model=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp="gelu",
    mlp_width=8192,
    window=128,
    context=None,
    full_tokens=262_144,
    swa_tokens=131_072,
)

_GPT_OSS = BenchConfig(
    name="gpt-oss-20b",
    about="openai/gpt-oss-20b in shape; its experts (4 of 32 active, 2880 wide each) are a "
    "dense SwiGLU as wide as four of them; no biases",
    layers=("swa", "full") * 12,
    d_model=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    mlp="swiglu",
    mlp_width=4 * 2880,
    window=128,
    context=1024,
    full_tokens=131_072,
    swa_tokens=32_768,
    qk_norm=False,
    sinks=True,
    rope_theta=150_000.0,
    swa_rope_theta=150_000.0,
)

_GEMMA3 = BenchConfig(
    name="gemma-3",
    about="google/gemma-3-12b in shape: five sliding-window layers to one full layer",
    layers=(("swa",) * 5 + ("full",)) * 8,
    d_model=3840,
    heads=16,
    kv_heads=8,
    head_dim=256,
    mlp="geglu",
    mlp_width=15_360,
    window=1024,
    context=2048,
    full_tokens=131_072,
    swa_tokens=65_536,
    post_norms=True,
)

_SMALL = BenchConfig(
    name="small",
    about="a small hybrid model for CPUs, in float32",
    layers=("swa", "full"),
    d_model=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp="gelu",
    mlp_width=256,
    window=16,
    context=32,
    full_tokens=512,
    swa_tokens=128,
    dtype=torch.float32,
)

CONFIGS: dict[str, BenchConfig] = {
    config.name: config for config in (_REF24, _GPT_OSS, _GEMMA3, _SMALL)
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one measured step.

    Attributes:
        batch: requests, each with one new token.
        window: keys that an "swa" layer sees.
        context: tokens of the longest request, and columns of the page table.
    """

    batch: int
    window: int
    context: int

    @classmethod
    def of(
        cls, config: BenchConfig, batch: int, window: int | None = None, context: int | None = None
    ) -> Shape:
        """The sizes that a run of `config` means, its defaults filled in.

        Raises:
            ValueError: a size is below 1, the context does not fill the window, or the pools of
                `config` have fewer slots than the step writes.
        """
        window = config.window if window is None else window
        if context is None:
            context = window if config.context is None else max(window, config.context)
        for name, value in (("batch", batch), ("window", window), ("context", context)):
            if value < 1:
                raise ValueError(f"{name} is at least 1; got {value}")
        if context < window:
            raise ValueError(f"a context of {context} tokens does not fill a window of {window}")
        if batch >= config.swa_tokens:
            raise ValueError(
                f"config {config.name!r} has {config.swa_tokens - 1} SWA slots; batch {batch} "
                "wants one for each new token"
            )
        return cls(batch, window, context)

    def key(self) -> str:
        """Its part of a row's name."""
        return f"B{self.batch}/W{self.window}/C{self.context}"
