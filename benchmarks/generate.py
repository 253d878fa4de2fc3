"""Tokens per second and KV memory of `HybridGenerator`, beside `model.generate` of transformers.

    python benchmarks/generate.py                                  # tiny models, on any machine
    python benchmarks/generate.py --size 1b --requests 16 --new 256  # on a GPU

Random weights, prompts of one length (theirs needs no padding then) and of mixed lengths. Both are
greedy. Theirs is the static cache with the forward compiled by torch.compile, which transformers
does itself on a GPU, and the default cache, uncompiled. A first run of each compiles; then they
take turns, and the median counts. Tokens are compared where the model is float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swa_compile import __version__
from swa_compile.hf import HybridGenerator

Prompts = list[list[int]]


@dataclass(frozen=True)
class Size:
    """The width of a model; the families take their other settings from `MODELS`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    window: int
    vocab: int
    experts: int


SIZES = {
    "tiny": Size(64, 4, 2, 32, 128, 6, 32, 512, 4),
    "small": Size(256, 4, 2, 64, 512, 12, 128, 4096, 4),
    "1b": Size(2048, 16, 8, 128, 6144, 24, 1024, 65536, 8),
}


def gemma3(size: Size) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(size.layers)]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim,
            query_pre_attn_scalar=size.head_dim,
            sliding_window=size.window,
            layer_types=kinds,
            max_position_embeddings=1 << 17,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def gpt_oss(size: Size) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(size.layers)]
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.inner // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim,
            num_local_experts=size.experts,
            num_experts_per_tok=2,
            sliding_window=min(size.window, 128),
            layer_types=kinds,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


MODELS: dict[str, Callable[[Size], Any]] = {"gemma-3": gemma3, "gpt-oss": gpt_oss}


OURS = "HybridGenerator"
THEIRS = {"static": "generate, static cache", "default": "generate, default cache"}


@dataclass
class Row:
    """One way of generating: `seconds`, a median, from the call to the last token."""

    model: str
    prompts: str
    way: str
    tokens: int
    seconds: float
    cache_bytes: int
    peak_bytes: int | None
    compile_seconds: float
    same_tokens: bool | None = None


def allocated(device: torch.device) -> int:
    """Bytes of the tensors on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float, int]:
    """What `run` returns, its seconds, and the most bytes that it had beside what was there."""
    gpu, before = device.type == "cuda", allocated(device)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if gpu:
        torch.cuda.synchronize()
    spent = time.perf_counter() - start
    return result, spent, torch.cuda.max_memory_allocated() - before if gpu else 0


def theirs(model: Any, prompts: Prompts, new: int, cache: str | None) -> tuple[list[Any], int]:
    """The new tokens of one padded batch, and the bytes of the cache."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    options = {} if cache is None else {"cache_implementation": cache}
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    layers = out.past_key_values.layers
    held = sum(t.nbytes for layer in layers for t in (layer.keys, layer.values))
    return out.sequences[:, longest:].tolist(), held


def measure(
    name: str,
    model: Any,
    prompts: Prompts,
    new: int,
    label: str,
    rounds: int,
    caches: list[str],
    overlap: bool | None,
) -> list[Row]:
    """A row for each way; after a first call of each, they take turns.

    The memory of a way is what its first call left behind, its pool and its recordings with it, and
    what a later call has beside that; the weights and the other ways are not in it.
    """
    begin = allocated(model.device)
    ours = HybridGenerator(
        model,
        max_tokens=sum(len(p) + new for p in prompts),
        max_requests=len(prompts),
        max_context=max(map(len, prompts)) + new,
        overlap=overlap,
    )

    def hybrid() -> tuple[list[Any], int]:
        return ours.generate(prompts, new), sum(ours.pool.nbytes().values())

    runs: dict[str, Callable[[], tuple[list[Any], int]]] = {OURS: hybrid}
    for cache in caches:
        given = cache if cache == "static" else None
        runs[THEIRS[cache]] = partial(theirs, model, prompts, new, given)
    first, kept = {}, {}
    for way, run in runs.items():
        first[way] = timed(run, model.device)[1]
        end = allocated(model.device)
        begin, kept[way] = end, end - begin
        print(f"{name}, {label}: first call of {way}: {first[way]:.1f} s", flush=True)
    turns = [{way: timed(run, model.device) for way, run in runs.items()} for _ in range(rounds)]
    rows, own = [], turns[0][OURS][0][0]
    for way in runs:
        tokens, held = turns[0][way][0]
        seconds = statistics.median(turn[way][1] for turn in turns)
        peak = kept[way] + turns[0][way][2] if model.device.type == "cuda" else None
        compiling = max(0.0, first[way] - seconds)
        row = Row(name, label, way, sum(map(len, tokens)), seconds, held, peak, compiling)
        if model.dtype is torch.float32:
            row.same_tokens = tokens == own
        rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    print(
        "| model | prompts | | tokens/s | KV cache, MiB | memory, MiB | compiled in, s | tokens |"
    )
    print("|---|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        same = {None: "", True: "equal", False: "**differ**"}[row.same_tokens]
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"
        print(
            f"| {row.model} | {row.prompts} | {row.way} | {row.tokens / row.seconds:,.0f} | "
            f"{row.cache_bytes / 2**20:,.2f} | {peak} | {row.compile_seconds:.1f} | {same} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=96, help="tokens of the longest (96)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate (64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, else bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each (5)")
    parser.add_argument("--caches", nargs="*", choices=THEIRS, default=list(THEIRS), help="theirs")
    parser.add_argument("--mixed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="HybridGenerator's (its default)",
    )
    parser.add_argument("--json", metavar="FILE", help="rewritten with each kind of prompts")
    args = parser.parse_args()
    default = "float32" if args.device == "cpu" else "bfloat16"
    dtype = getattr(torch, args.dtype or default)
    size = SIZES[args.size]
    rows: list[Row] = []
    for name in args.models:
        torch.manual_seed(0)
        with torch.device(args.device):
            model = MODELS[name](size).to(dtype).eval()
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name}: {parameters / 1e6:,.1f} M parameters, {dtype}", flush=True)
        generator = torch.Generator().manual_seed(1)

        def prompt(length: int, generator: torch.Generator = generator) -> list[int]:
            return torch.randint(3, size.vocab, (length,), generator=generator).tolist()  # type: ignore[no-any-return]

        count, longest = args.requests, args.prompt
        even = [prompt(longest) for _ in range(count)]
        mixed = [prompt(max(1, longest * (i + 1) // count)) for i in range(count)]
        for prompts, label in (
            (even, f"{count} of {longest}"),
            (mixed, f"{count}, up to {longest}"),
        ):
            if args.mixed or prompts is even:
                rows += measure(
                    name, model, prompts, args.new, label, args.rounds, args.caches, args.overlap
                )
                save(rows, args.json)
        # Cycles keep a model alive; freed later, it would count as given back by the next one.
        del model
        torch.compiler.reset()
        gc.collect()
    print(f"\ntorch {torch.__version__}, swa-compile {__version__}, {args.device}\n")
    show(rows)


def save(rows: list[Row], path: str | None) -> None:
    if path is not None:
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
