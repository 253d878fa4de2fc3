"""Text generation with a transformers model over a hybrid KV pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from swa_compile.collecting import collect
from swa_compile.hf.ahead import Ahead
from swa_compile.hf.bridge import Bridge
from swa_compile.hf.buckets import forward_in_buckets
from swa_compile.hf.progress import token_progress
from swa_compile.hf.room import Room, chunk_for
from swa_compile.hf.sampling import Sampling
from swa_compile.hf.scheduler import Scheduler
from swa_compile.hf.scheduler import Sequence as Running
from swa_compile.hf.tokens import Token, token_ids, token_ids_within
from swa_compile.passes import GraphReport


class HybridGenerator:
    """Generates with an unmodified causal language model of transformers over a KV pool.

    Requests are batched continuously: they join when the pool has room and leave when they end.
    Long prompts go in by chunks, beside the decode steps of others. What has left the window is
    evicted while decoding.

    Args:
        model: in eval mode.
        max_tokens: capacity of the full pool, in tokens over all requests.
        max_requests: requests that run at once; the others wait.
        max_context: tokens that one request can have; default `max_tokens`. It is the width of
            every page table, so a tight one is faster.
        page_size: tokens per page.
        swa_tokens: capacity of the sliding-window pool; by default enough for `max_requests`.
        backend: "swa", "swa_eager" or any other of torch.compile; None or "eager" compiles nothing.
        options: of the backend; for "swa" see `swa_compile.Options`.
        chunk: prompt tokens of a request per forward; default: the window, or 512 without one,
            less where `swa_tokens` is too small for that.
        capture_sizes: token counts that batches are padded to and captured at, by a
            `BucketRunner`; larger ones run as they are. By default powers of 2 up to
            `max_requests` on a GPU where the backend captures, and none elsewhere; () for none.
        overlap: prepare and begin each forward before the tokens of the one before it are known to
            the host, so that a GPU need not wait; a request that ends with a token nobody could
            foresee takes part in one forward more, whose token is dropped. The tokens are the same.
            Default: on a GPU, where it saves the wait; elsewhere nothing would run meanwhile.

    Attributes:
        reports: a `GraphReport` of every graph that was compiled.
        pool: the `HybridKVPool`.
        width: columns of every batch's page table.
        forward: what runs a batch, a `Forward`; what captures graphs may be put around it.

    Raises:
        UnsupportedModel: (a ValueError) the model cannot run over a pool, and why.
        ValueError, TypeError: for the other arguments.
    """

    # Tokens beyond the next one that a decoding request may take in a forward.
    lookahead = 0

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int,
        max_requests: int,
        page_size: int = 1,
        swa_tokens: int | None = None,
        backend: Any = "swa",
        options: dict[str, Any] | None = None,
        max_context: int | None = None,
        chunk: int | None = None,
        capture_sizes: Sequence[int] | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.bridge = Bridge(model)
        self.pool = self.bridge.make_pool(
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_context=max_context,
            page_size=page_size,
            swa_tokens=swa_tokens,
            max_extend=1 + self.lookahead,
        )
        self.reports: list[GraphReport] = []
        self.chunk = chunk_for(self.pool, chunk)
        self.forward = forward_in_buckets(
            self.bridge, self.pool, backend, options, capture_sizes, max_requests
        )
        # Of every batch, so that its shape does not change with the lengths of the requests.
        self.width = -(-self.pool.max_context // page_size)
        self._overlap = model.device.type == "cuda" if overlap is None else overlap
        self._running = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Collection[int] = (),
        on_token: Callable[[Token], None] | None = None,
        progress: bool = False,
    ) -> list[list[int]]:
        """New tokens for each prompt; greedy by default.

        A request ends with the model's EOS token or one of `stop`, which it then includes as
        transformers does, or after `max_new_tokens`.

        Args:
            prompts: token ids, none empty; as many as you like.
            temperature, top_p, seed: see `Sampling`.
            stop: token ids that end a request, beside the model's EOS.
            on_token: called with each `Token` as soon as it is known.
            progress: show a progress bar.

        Raises:
            ValueError: before anything runs, where an argument is wrong or a request could never
                fit into the pool; later, where the logits give no token, as they hold NaN.
            TypeError: before anything runs, where an argument is of another type.
        """
        results: list[list[int]] = [[] for _ in prompts]
        tokens = self.stream(
            prompts, max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
        )
        total = len(prompts) * max_new_tokens
        # Closed here: an error of `on_token`, as long as somebody keeps it, keeps the stream.
        with closing(tokens), token_progress(total, progress) as advance:
            for token in tokens:
                results[token.prompt].append(token.id)
                # A request that ends early brings the bar what it will not generate.
                done = len(results[token.prompt])
                advance(1 + (max_new_tokens - done) * token.last)
                if on_token is not None:
                    on_token(token)
        return results

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Collection[int] = (),
    ) -> Generator[Token, None, None]:
        """The tokens of `generate`, one after another, as they come. Raises as `generate` does."""
        if isinstance(max_new_tokens, bool) or not hasattr(max_new_tokens, "__index__"):
            raise TypeError(f"max_new_tokens is an int; got {max_new_tokens!r}")
        limit = index(max_new_tokens)
        if limit < 1:
            raise ValueError(f"max_new_tokens is at least 1; got {limit}")
        sampling = Sampling(temperature, top_p, seed)
        ends = self._eos() | set(token_ids("stop", stop))
        return self._tokens(self._scheduler(prompts, limit), sampling, ends)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `[B, vocab]` of the token after each prompt. Raises as `generate` does."""
        scheduler = self._scheduler(prompts, 0)
        rows: dict[int, Tensor] = {}
        for waiting, logits in self._steps(scheduler):
            for row, sequence in waiting.items():
                rows[sequence.index] = logits[row]
                scheduler.finish(sequence)
        if not rows:
            vocab = self.bridge.model.config.get_text_config().vocab_size
            return torch.empty(0, vocab, dtype=self.bridge.dtype, device=self.bridge.model.device)
        return torch.stack([rows[i] for i in range(len(prompts))])

    # ---- the loop ---------------------------------------------------------------------------

    def _tokens(
        self, scheduler: Scheduler, sampling: Sampling, ends: set[int]
    ) -> Generator[Token, None, None]:
        ahead = Ahead(scheduler, sampling, ends, overlap=self._overlap)
        yield from ahead.tokens(self._steps(scheduler, ahead.fill))

    def _steps(
        self, scheduler: Scheduler, fill: Callable[[Tensor], Tensor] | None = None
    ) -> Generator[tuple[dict[int, Running], Tensor], None, None]:
        """Forward after forward: by row of its logits `[B, vocab]`, who waits for a token.

        Args:
            fill: puts ids in place of place holders.
        """
        with self._running_alone(scheduler):
            while pieces := scheduler.pieces():
                rows = [(sequence.row, ids) for sequence, ids in pieces]
                lengths = [sequence.length for sequence, _ in pieces]
                batch = self.bridge.batch(self.pool, rows, lengths, width=self.width)  # type: ignore[arg-type]
                if fill is not None:
                    batch = replace(batch, input_ids=fill(batch.input_ids))
                with self.collecting():
                    logits = self.forward(batch)
                waiting = {}
                for row, (sequence, ids) in enumerate(pieces):
                    sequence.sent += len(ids)
                    if sequence.waits_for_token:
                        waiting[row] = sequence
                yield waiting, logits

    @contextmanager
    def _running_alone(self, scheduler: Scheduler) -> Iterator[None]:
        """The one run that there is at a time; what it holds is given back at its end."""
        if self._running:
            raise RuntimeError("this generator is running already: its pool serves one run at once")
        self._running = True
        try:
            yield
        finally:
            scheduler.clear()
            self._running = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What is compiled inside is added to `reports`."""
        with collect() as reports:
            yield
        self.reports += reports

    # ---- arguments --------------------------------------------------------------------------

    def _scheduler(self, prompts: Sequence[Sequence[int]], limit: int) -> Scheduler:
        scheduler = self._empty_scheduler()
        vocab = self.bridge.model.get_input_embeddings().weight.shape[0]
        for i, prompt in enumerate(prompts):
            ids = token_ids_within(f"prompt {i}", prompt, vocab)
            if not ids:
                raise ValueError(f"prompt {i} is empty: there is nothing to continue")
            scheduler.add(Running(i, ids, limit))
        return scheduler

    def _empty_scheduler(self) -> Scheduler:
        border = self.bridge.adaptation.restart_at
        return Scheduler(Room(self.pool, self.chunk, restarts=border is not None), border)

    def _eos(self) -> set[int]:
        eos = self.bridge.model.generation_config.eos_token_id
        if eos is None:
            return set()
        return set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}
