"""One layer's qk-norm, RoPE and stores alone: what Inductor's choice of blocks makes of them.

20 calls stand in one CUDA graph. Ours is compiled several times, each time cold: the same code has
run at a tenth of its speed where start-up autotuning picked its blocks by noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from swa_compile.bench.cold import cold_caches
from swa_compile.bench.configs import CONFIGS, BenchConfig
from swa_compile.bench.graphs import captured
from swa_compile.bench.model import Heads, rope_table, store_aten
from swa_compile.bench.profiling import profile_step
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say
from swa_compile.bench.timing import interleaved, summary
from swa_compile.ops import store_kv

CALLS = 20

_POSITIONS = 4096


@dataclass
class Operands:
    """Operands of the stores of one layer."""

    heads: Heads
    qkv: Tensor  # [B, qkv_width]
    angles: Tensor  # [B, head_dim], read from a table once per forward, not here
    loc: Tensor  # [B], rows of the caches
    k_cache: Tensor
    v_cache: Tensor

    @classmethod
    def make(cls, config: BenchConfig, batch: int, device: torch.device) -> Operands:
        generator = torch.Generator(device).manual_seed(0)
        rows = min(config.swa_tokens, 32_768)
        if batch >= rows:
            raise ValueError(f"batch is less than {rows} here; got {batch}")
        with torch.device(device):

            def noise(*shape: int) -> Tensor:
                return torch.empty(*shape, dtype=config.dtype).normal_(generator=generator)

            heads = Heads(config).requires_grad_(False)
            form = (rows, config.kv_heads, config.head_dim)
            table = rope_table(_POSITIONS, config.head_dim, config.swa_rope_theta).to(device)
            return cls(
                heads,
                noise(batch, config.qkv_width),
                table[torch.randint(_POSITIONS, (batch,), generator=generator)],
                1 + torch.randperm(rows - 1, generator=generator)[:batch],
                noise(*form),
                noise(*form),
            )

    def forward(self, store: Callable[..., None] | None) -> Callable[..., Tensor]:
        heads = self.heads

        def forward(
            qkv: Tensor,
            angles: Tensor,
            loc: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
        ) -> Any:
            q, k, v = heads(qkv, angles)
            if store is None:
                return q, k
            store(k_cache, v_cache, k, v, loc)
            return q

        return forward

    def arguments(self) -> tuple[Tensor, ...]:
        """What `forward` is called with."""
        return (self.qkv, self.angles, self.loc, self.k_cache, self.v_cache)

    def expect(self, call: Callable[..., Any]) -> None:
        """Raise where `call` stores other rows, or gives another q, than eager code.

        Raises:
            RuntimeError: saying which.
        """
        q = self.forward(store_kv)(*self.arguments())
        want = [cache.clone() for cache in (self.k_cache, self.v_cache)]
        for cache in (self.k_cache, self.v_cache):
            cache[self.loc] = torch.nan
        got = call(*self.arguments())
        if not torch.allclose(got.float(), q.float(), rtol=0.03, atol=0.03):
            raise RuntimeError("q is not what eager code gives")
        for name, cache, rows in zip("KV", (self.k_cache, self.v_cache), want, strict=True):
            if not torch.allclose(cache.float(), rows.float(), rtol=0.03, atol=0.03):
                raise RuntimeError(f"the rows of {name} are not what eager code stores")


# (name, backend, store)
_WAYS: tuple[tuple[str, str, Callable[..., None] | None], ...] = (
    ("no store", "inductor", None),
    ("opaque store", "inductor", store_kv),
    ("aten store", "inductor", store_aten),
)


@torch.no_grad()
def measure(
    batch: int,
    device: torch.device,
    *,
    compilations: int,
    runs: int,
    config: BenchConfig | None = None,
    say: Say = lambda _: None,
) -> Row:
    """Microseconds per call of each way, and of ours for each of `compilations`."""
    config = config or CONFIGS["ref24"]
    layer = Operands.make(config, batch, device)
    plan = [*_WAYS, *[(f"ours {i}", "swa", store_kv) for i in range(1, compilations + 1)]]
    entries: dict[str, Row] = {}
    steps = {}
    for name, backend, store in plan:
        say(name)
        options: Any = {"cudagraphs": "off"} if backend == "swa" else None
        with cold_caches():
            call: Any = torch.compile(
                layer.forward(store),
                backend=backend,
                options=options,
                fullgraph=True,
                dynamic=False,
            )
            call(*layer.arguments())
            if store is not None:
                layer.expect(call)

            def calls(call: Any = call) -> None:
                for _ in range(CALLS):
                    call(*layer.arguments())

            steps[name] = captured(calls) if device.type == "cuda" else calls
            entries[name] = {}
            if device.type == "cuda":
                profile = profile_step(steps[name])
                entries[name]["launches"] = profile["launches"] / CALLS
                entries[name]["names"] = profile["names"]
    say("timing")
    for name, samples in interleaved(steps, runs, device).items():
        clock = "gpu" if "gpu" in samples else "wall"
        per_call = [value * 1e3 / CALLS for value in samples[clock]]
        entries[name] |= {"us": summary(per_call), "clock": clock}
    ours = [entry["us"]["median"] for name, entry in entries.items() if name.startswith("ours")]
    return {
        "batch": batch,
        "calls": CALLS,
        "compilations": compilations,
        "ways": entries,
        "ours_us": {"median": median(ours), "min": min(ours), "max": max(ours)},
    }
