"""`swa-compile generate`: text from a local checkpoint over a hybrid KV pool."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from swa_compile.cli.checkpoint import Checkpoint, add_model_options
from swa_compile.cli.device import add_device_option, chosen_device
from swa_compile.cli.errors import CheckFailed, UsageError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="generate text with a transformers model from a local folder",
        description="Load a causal language model of transformers from a local folder, compile it "
        "over a hybrid KV pool, and print what it generates as it comes. Nothing is downloaded.",
    )
    add_model_options(parser, required=True)
    parser.add_argument(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="text, or token ids ('5 17 3') where there is no tokenizer; may be given repeatedly",
    )
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="a smaller model with the same vocabulary, as --model takes it: it proposes tokens, "
        "and the model verifies several at once (speculative decoding; the same tokens, sooner)",
    )
    parser.add_argument(
        "--draft-tokens", type=int, metavar="N", help="most tokens to draft at a time (4)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (64)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="ends a text beside the model's own end, e.g. '<end_of_turn>' (an id where there is "
        "no tokenizer); may be given repeatedly",
    )
    parser.add_argument("--max-tokens", type=int, help="pool size (default: what the prompts take)")
    parser.add_argument("--max-requests", type=int, help="that run at once (all)")
    parser.add_argument("--backend", default="swa", choices=("swa", "swa_eager", "eager"))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (1)")
    add_device_option(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Generate, streaming, and print the report.

    Raises:
        UsageError: the model, a prompt or an option cannot be used, and why.
        CheckFailed: the model gives no token: its logits are no numbers.
    """
    for name in ("max_new_tokens", "max_tokens", "max_requests", "page_size", "draft_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1; got {value}")
    if args.draft is None and args.draft_tokens is not None:
        raise UsageError("--draft-tokens says how much a --draft proposes, and there is none")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    device = chosen_device(args.device)
    checkpoint = Checkpoint.open(args.model, args.dtype, args.seed, device)
    draft = None
    if args.draft is not None:
        draft = Checkpoint.open(args.draft, args.dtype, args.seed, device)
        checkpoint.refuse_another_vocabulary(draft)
    _tell(console, [*checkpoint.notices, *(draft.weight_notices if draft is not None else [])])
    prompts = [checkpoint.encode(text) for text in args.prompt]
    stop = [checkpoint.token(text) for text in args.stop]

    from swa_compile.hf import Token

    lengths = [len(prompt) + args.max_new_tokens + args.page_size for prompt in prompts]
    try:
        generator = _generator(
            checkpoint.model,
            None if draft is None else draft.model,
            args.draft_tokens or 4,
            max_tokens=args.max_tokens or sum(lengths),
            max_requests=args.max_requests or len(prompts),
            max_context=max(lengths),
            page_size=args.page_size,
            backend=args.backend,
        )
        tokens = generator.stream(
            prompts,
            args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            stop=stop,
        )
    except ValueError as error:  # an unsupported model among them
        raise UsageError(str(error)) from error

    _tell(console, checkpoint.length_notices([len(p) + args.max_new_tokens for p in prompts]))
    texts = [checkpoint.text() for _ in prompts]
    times: list[float] = []

    def show(token: Token) -> None:
        piece = texts[token.prompt].add(token.id, token.last)
        if len(prompts) == 1:
            console.out(piece, end="\n" if token.last else "", highlight=False)
        elif token.last:
            console.print(f"[{token.prompt}] {texts[token.prompt].so_far}")

    try:
        for token in tokens:
            times.append(time.perf_counter())
            show(token)
    except ValueError as error:  # logits that are no numbers
        raise CheckFailed(str(error)) from error
    console.print()
    console.print(_report(generator, times))


def _tell(console: Console, notices: list[str]) -> None:
    for line in notices:
        console.print(line, style="bold yellow")


def _generator(model: Any, draft: Any, draft_tokens: int, **options: Any) -> Any:
    from swa_compile.hf import HybridGenerator, SpeculativeGenerator

    if draft is None:
        return HybridGenerator(model, **options)
    return SpeculativeGenerator(model, draft, draft_tokens=draft_tokens, **options)


def _report(generator: Any, times: list[float]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    _add_graphs(table, generator.reports, "")
    draft = getattr(generator, "draft", None)
    if draft is not None:
        _add_graphs(table, draft.reports, "draft: ")
        counts = generator.acceptance
        share = f"{counts.accepted} of {counts.drafted} ({counts.rate:.0%})"
        table.add_row("draft tokens accepted", share)
        table.add_row("mean acceptance length", f"{counts.mean_length:.2f} tokens a verification")
    table.add_row("tokens", _rate(times))
    pool = generator.pool
    held = sum(pool.nbytes().values())
    table.add_row("pool", f"{_bytes(held)} for {pool.full_tokens} tokens")
    if draft is not None:
        own = sum(draft.pool.nbytes().values())
        table.add_row("draft: pool", f"{_bytes(own)} for {draft.pool.full_tokens} tokens")
    table.add_row("if every layer kept all", _bytes(pool.full_only_nbytes()))
    gain = pool.full_tokens / max(1, pool.full_only_tokens())
    table.add_row("tokens per byte", f"{gain:.2f} times those of a full-only pool")
    return table


def _add_graphs(table: Table, reports: Sequence[Any], whose: str) -> None:
    if reports:
        found = " and ".join(str(n) for n in sorted({r.translations_found for r in reports}))
        nodes = max(report.translation_nodes for report in reports)
        nodes_of = f"{found} -> {nodes} node{'s' * (nodes != 1)}"
        table.add_row(f"{whose}translations per forward", nodes_of)
        lowered = sum(report.stores_lowered for report in reports)
        stores = sum(report.stores_found for report in reports)
        table.add_row(f"{whose}KV stores lowered", f"{lowered} of {stores}")
        table.add_row(f"{whose}graphs compiled", str(len(reports)))


def _rate(times: list[float]) -> str:
    # The second half: the first holds compilation.
    late = times[len(times) // 2 :]
    if len(late) < 2 or late[-1] == late[0]:
        return str(len(times))
    return f"{len(times)}, {(len(late) - 1) / (late[-1] - late[0]):.1f} per second after warm-up"


def _bytes(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
