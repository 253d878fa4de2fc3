"""What the passes cost: their own time against graph size, without tracing and code generation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from swa_compile.bench.cold import cold_caches
from swa_compile.bench.record import Row
from swa_compile.bench.steps import Say
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.passes import HoistPipeline


@dataclass
class Spent:
    """Seconds that the passes took, and the nodes that the graphs had before."""

    seconds: float = 0.0
    nodes: int = 0


@contextmanager
def timed_passes() -> Iterator[Spent]:
    """Add up the time of every run of the pass object inside."""
    spent = Spent()
    run = HoistPipeline.__call__

    def timed(self: HoistPipeline, graph: torch.fx.Graph) -> None:
        spent.nodes += len(graph.nodes)
        start = time.perf_counter()
        run(self, graph)
        spent.seconds += time.perf_counter() - start

    HoistPipeline.__call__ = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        HoistPipeline.__call__ = run  # type: ignore[method-assign]


def compile_once(layers: int, backend: str) -> tuple[float, Spent]:
    """One cold compilation of a narrow model: its seconds, and what the passes took of them.

    Each layer has norms, RoPE, an MLP, two translations and a store, about 60 nodes.
    """
    config = HybridConfig(layers=("swa",) * layers, d_model=32, head_dim=8, window=8)
    pool = HybridKVPool(config.layer_specs(), max_tokens=64, max_requests=2)
    model = HybridTransformer(config, pool).eval()
    batch = pool.batch([(pool.open(), [1, 2, 3]), (pool.open(), [4, 5])], width=8)
    with cold_caches(), timed_passes() as spent, torch.no_grad():
        start = time.perf_counter()
        torch.compile(model, backend=backend, fullgraph=True)(batch)
        return time.perf_counter() - start, spent


def measure(depths: Sequence[int], say: Say = lambda _: None) -> Row:
    """The passes alone (`swa_eager`) at each of `depths` layers. On the CPU, whatever the card."""
    compile_once(1, "swa_eager")  # imports
    entries = []
    for layers in depths:
        say(f"{layers} layers")
        # The better of two: a pause of the machine only ever adds. Deep ones take long to trace.
        tries = [compile_once(layers, "swa_eager")[1] for _ in range(2 if layers <= 64 else 1)]
        spent = min(tries, key=lambda one: one.seconds)
        entries.append(
            {
                "layers": layers,
                "nodes": spent.nodes,
                "passes_s": round(spent.seconds, 4),
                "us_per_node": round(spent.seconds / spent.nodes * 1e6, 2),
            }
        )
    return {"depths": entries}
