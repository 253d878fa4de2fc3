"""What the passes cost: their time against graph size, and against a whole cold compilation.

    python benchmarks/pass_cost.py                    # 1 ... 128 layers, passes only
    python benchmarks/pass_cost.py --inductor 4 12    # and the share of a cold Inductor compilation

Each layer of the measured forward has norms, RoPE, an MLP, two translations and a store, about 60
nodes. The time is that of the pass object itself, so tracing and code generation are not in it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from unittest import mock

import torch

import swa_compile
from swa_compile.kv import HybridKVPool
from swa_compile.models import HybridConfig, HybridTransformer
from swa_compile.passes import HoistPipeline


def compile_once(layers: int, backend: str) -> tuple[float, float, int]:
    """(seconds of the whole compilation, seconds of the passes, nodes of the functional graph)."""
    config = HybridConfig(layers=("swa",) * layers, d_model=32, head_dim=8, window=8)
    pool = HybridKVPool(config.layer_specs(), max_tokens=64, max_requests=2)
    model = HybridTransformer(config, pool).eval()
    batch = pool.batch([(pool.open(), [1, 2, 3]), (pool.open(), [4, 5])], width=8)
    spent: list[float] = []
    nodes: list[int] = []
    run = HoistPipeline.__call__

    def timed(self: HoistPipeline, graph: torch.fx.Graph) -> None:
        nodes.append(len(graph.nodes))
        start = time.perf_counter()
        run(self, graph)
        spent.append(time.perf_counter() - start)

    torch._dynamo.reset()
    # A cold compilation: a cache folder that nothing has written to.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder),
        mock.patch.object(HoistPipeline, "__call__", timed),
        torch.no_grad(),
    ):
        start = time.perf_counter()
        torch.compile(model, backend=backend, fullgraph=True)(batch)
        whole = time.perf_counter() - start
    return whole, sum(spent), sum(nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--inductor", type=int, nargs="*", default=[], metavar="LAYERS")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, swa_compile {swa_compile.__version__}")
    compile_once(1, "swa_eager")  # imports
    print(f"{'layers':>7} {'nodes':>8} {'passes':>10} {'us per node':>12}")
    for layers in args.layers:
        _, passes, nodes = compile_once(layers, "swa_eager")
        print(f"{layers:>7} {nodes:>8} {passes:>8.3f} s {passes / nodes * 1e6:>12.1f}")
    if args.inductor:
        print(f"{'layers':>7} {'cold compile':>13} {'passes':>10} {'share':>8}")
    for layers in args.inductor:
        whole, passes, _ = compile_once(layers, "swa")
        print(f"{layers:>7} {whole:>11.1f} s {passes:>8.3f} s {passes / whole:>8.2%}")


if __name__ == "__main__":
    main()
