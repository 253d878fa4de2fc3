"""What the passes cost: their time against graph size, and against a whole cold compilation.

    python benchmarks/pass_cost.py                    # 1 ... 128 layers, passes only
    python benchmarks/pass_cost.py --inductor 4 12    # and the share of a cold Inductor compilation

Each layer of the measured forward has norms, RoPE, an MLP, two translations and a store, about 60
nodes. The time is that of the pass object itself, so tracing and code generation are not in it.
"""

from __future__ import annotations

import argparse

import torch

import swa_compile
from swa_compile.bench.pass_time import compile_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--inductor", type=int, nargs="*", default=[], metavar="LAYERS")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, swa_compile {swa_compile.__version__}")
    compile_once(1, "swa_eager")  # imports
    print(f"{'layers':>7} {'nodes':>8} {'passes':>10} {'us per node':>12}")
    for layers in args.layers:
        _, spent = compile_once(layers, "swa_eager")
        per_node = spent.seconds / spent.nodes * 1e6
        print(f"{layers:>7} {spent.nodes:>8} {spent.seconds:>8.3f} s {per_node:>12.1f}")
    if args.inductor:
        print(f"{'layers':>7} {'cold compile':>13} {'passes':>10} {'share':>8}")
    for layers in args.inductor:
        whole, spent = compile_once(layers, "swa")
        share = spent.seconds / whole
        print(f"{layers:>7} {whole:>11.1f} s {spent.seconds:>8.3f} s {share:>8.2%}")


if __name__ == "__main__":
    main()
